//! A SLURM cluster of this one machine, with daemons of its own, in a scratch folder.

use std::fs;
use std::net::ToSocketAddrs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use runtime::launch::local::reserve_port;
use rustix::process::{Pid, Signal, kill_process};

/// SLURM's daemons, ended with this.
pub struct Cluster<'a> {
    folder: &'a Path,
    daemons: Vec<Child>,
}

impl Cluster<'_> {
    /// Starts the daemons and waits until they take work, or says why they do not.
    pub fn start(folder: &Path) -> Result<Cluster<'_>, String> {
        let path = folder.display();
        let host = fs::read_to_string("/proc/sys/kernel/hostname").map_err(|error| error.to_string())?;
        let host = host.trim().split('.').next().unwrap_or_default();
        (host, 0).to_socket_addrs().map_err(|error| format!("this host's name {host}: {error}"))?;
        let (controller, node) = (free_port()?, free_port()?);
        let configuration = format!(
            "ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\nSlurmctldPort={controller}\nSlurmdPort={node}\n\
             SlurmUser=root\nAuthType=auth/munge\nAuthInfo=socket={path}/munge\nProctrackType=proctrack/linuxproc\n\
             TaskPlugin=task/none\nSchedulerType=sched/builtin\nMpiDefault=none\nReturnToService=2\n\
             StateSaveLocation={path}\nSlurmdSpoolDir={path}/spool\nSlurmctldPidFile={path}/slurmctld.pid\n\
             SlurmdPidFile={path}/slurmd.pid\nNodeName={host} NodeAddr=127.0.0.1 CPUs=1 State=UNKNOWN\n\
             PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP\n"
        );
        fs::write(folder.join("slurm.conf"), configuration).map_err(|error| error.to_string())?;
        fs::write(folder.join("munge.key"), [7; 1024]).map_err(|error| error.to_string())?;
        fs::set_permissions(folder.join("munge.key"), fs::Permissions::from_mode(0o600)).ok();
        fs::set_permissions(folder, fs::Permissions::from_mode(0o711)).ok();
        let mut cluster = Cluster { folder, daemons: Vec::new() };
        let munge =
            ["key-file=munge.key", "socket=munge", "pid-file=munge.pid", "log-file=munge.log", "seed-file=seed"];
        let munge = munge.map(|option| option.replacen('=', &format!("={path}/"), 1));
        let options = munge.iter().map(|option| format!("--{option}"));
        cluster.daemon("munged", options.chain(["--foreground".to_owned(), "--force".to_owned()]))?;
        cluster.daemon("slurmctld", ["-D".to_owned()].into_iter())?;
        cluster.daemon("slurmd", ["-D".to_owned()].into_iter())?;
        cluster.await_idle()?;
        Ok(cluster)
    }

    /// One of SLURM's commands, for this cluster.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("SLURM_CONF", self.folder.join("slurm.conf"));
        command
    }

    fn daemon(&mut self, program: &str, options: impl Iterator<Item = String>) -> Result<(), String> {
        let log = fs::File::create(self.folder.join(format!("{program}.log"))).map_err(|error| error.to_string())?;
        let output = log.try_clone().map_err(|error| error.to_string())?;
        let mut command = self.command(program);
        command.args(options).stdin(Stdio::null()).stdout(output).stderr(log);
        self.daemons.push(command.spawn().map_err(|error| format!("{program}: {error}"))?);
        Ok(())
    }

    /// Waits until the node takes work.
    fn await_idle(&self) -> Result<(), String> {
        let deadline = Instant::now() + Duration::from_secs(20);
        while Instant::now() < deadline {
            let output = self.command("sinfo").args(["-h", "-o", "%T"]).output().map_err(|error| error.to_string())?;
            if String::from_utf8_lossy(&output.stdout).trim() == "idle" {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        Err(self.logs())
    }

    /// The last lines that the daemons wrote.
    pub fn logs(&self) -> String {
        let last = |name| {
            let text = fs::read_to_string(self.folder.join(name)).unwrap_or_default();
            let lines: Vec<&str> = text.lines().collect();
            format!("\n{name}: {}", lines[lines.len().saturating_sub(5)..].join("\n"))
        };
        ["munged.log", "slurmctld.log", "slurmd.log"].map(last).concat()
    }
}

impl Drop for Cluster<'_> {
    fn drop(&mut self) {
        // Asked to end they end their own children; killed they would leave them.
        for daemon in self.daemons.iter_mut().rev() {
            if let Some(process) = i32::try_from(daemon.id()).ok().and_then(Pid::from_raw) {
                kill_process(process, Signal::TERM).ok();
            }
            let deadline = Instant::now() + Duration::from_secs(10);
            while daemon.try_wait().is_ok_and(|status| status.is_none()) && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(10));
            }
            daemon.kill().ok();
            daemon.wait().ok();
        }
    }
}

fn free_port() -> Result<u16, String> {
    reserve_port().map(|reserved| reserved.port).map_err(|error| error.to_string())
}
