//! Two hosts on one: network namespaces of their own.

use std::process::Command;

/// Addresses of the hosts.
pub const FIRST_HOST: &str = "10.213.7.1";
const SECOND_HOST: &str = "10.213.7.2";

/// Two network namespaces joined by a cable.
pub struct Namespaces {
    /// Their names.
    pub names: [String; 2],
}

impl Namespaces {
    /// Makes both, or says why it cannot.
    pub fn new() -> Result<Namespaces, String> {
        let names = [1, 2].map(|host| format!("planwright-{}-{host}", std::process::id()));
        let namespaces = Namespaces { names };
        let [a, b] = &namespaces.names;
        for name in [a, b] {
            ip(&format!("netns add {name}"))?;
            ip(&format!("-n {name} link set lo up"))?;
        }
        ip(&format!("-n {a} link add cable type veth peer name cable netns {b}"))?;
        for (name, address) in [(a, FIRST_HOST), (b, SECOND_HOST)] {
            ip(&format!("-n {name} address add {address}/24 dev cable"))?;
            ip(&format!("-n {name} link set cable up"))?;
        }
        Ok(namespaces)
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        self.names.iter().for_each(|name| drop(ip(&format!("netns delete {name}"))));
    }
}

/// Runs `ip` with arguments; the error says what went wrong.
pub fn ip(arguments: &str) -> Result<(), String> {
    let output = Command::new("ip").args(arguments.split(' ')).output().map_err(|error| format!("ip: {error}"))?;
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() { Ok(()) } else { Err(format!("ip {arguments}: {message}")) }
}
