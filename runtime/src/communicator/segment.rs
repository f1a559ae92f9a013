//! Memory that the ranks of one host share: nameless files that end with their last process.
//!
//! A segment is an anonymous file of the kernel (`memfd_create`), which others open through the descriptor of
//! the rank that made it. No name exists at any time, so nothing is left behind however ranks end, and the
//! size of `/dev/shm` does not matter.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64};

use memmap2::{MmapOptions, MmapRaw};
use rustix::fd::AsRawFd;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

/// Mapped memory, zero at first.
pub struct Segment {
    map: MmapRaw,
    /// Kept open for the ranks that open it through this process.
    file: Option<File>,
}

impl Segment {
    /// Memory that other ranks of this host can open.
    ///
    /// # Errors
    /// Those of the system: no file descriptor or address space left.
    pub fn create(bytes: usize) -> io::Result<Segment> {
        let file = File::from(memfd_create("planwright", MemfdFlags::CLOEXEC)?);
        ftruncate(&file, bytes as u64)?;
        Ok(Segment { map: MmapOptions::new().len(bytes).map_raw(&file)?, file: Some(file) })
    }

    /// The memory that another process made.
    ///
    /// # Errors
    /// If the process is not of this host and user, or the file is not of this size.
    pub fn open(process: u32, descriptor: i32, bytes: usize) -> io::Result<Segment> {
        let path = format!("/proc/{process}/fd/{descriptor}");
        let file = File::options().read(true).write(true).open(path)?;
        if file.metadata()?.len() != bytes as u64 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(Segment { map: MmapOptions::new().len(bytes).map_raw(&file)?, file: None })
    }

    /// Memory of this process alone.
    ///
    /// # Errors
    /// If no address space is left.
    pub fn private(bytes: usize) -> io::Result<Segment> {
        Ok(Segment { map: MmapOptions::new().len(bytes).map_anon()?.into(), file: None })
    }

    /// The descriptor under which others open it; none if this process did not make it.
    pub fn descriptor(&self) -> Option<i32> {
        self.file.as_ref().map(|file| file.as_raw_fd())
    }

    /// `count` words from a multiple of eight bytes on.
    #[allow(unsafe_code)]
    pub fn words(&self, offset: usize, count: usize) -> &[AtomicU64] {
        assert!(offset.is_multiple_of(8) && offset + 8 * count <= self.map.len(), "words lie inside the segment");
        // SAFETY: the range is mapped for as long as `self` lives (checked above; the file is never shortened), a
        // map starts at a page and so is aligned, every bit pattern is an `AtomicU64`, and all processes access
        // these bytes only through atomics.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(offset).cast(), count) }
    }

    /// A word of 32 bits at a multiple of four bytes.
    #[allow(unsafe_code)]
    pub fn word32(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4) && offset + 4 <= self.map.len(), "the word lies inside the segment");
        // SAFETY: as in `words`.
        unsafe { &*self.map.as_ptr().add(offset).cast() }
    }

    /// Copies bytes in. The caller has the range to itself until it says otherwise through an atomic.
    #[allow(unsafe_code)]
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.map.len(), "the range lies inside the segment");
        // SAFETY: the range is mapped (checked above), and by the rings' protocol nobody reads or writes it
        // between the release of its slot by the reader and its publication by this writer.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.map.as_mut_ptr().add(offset), bytes.len()) }
    }

    /// Bytes that another rank wrote and published, and leaves alone until this rank releases them.
    #[allow(unsafe_code)]
    pub fn read(&self, offset: usize, length: usize) -> &[u8] {
        assert!(offset + length <= self.map.len(), "the range lies inside the segment");
        // SAFETY: the range is mapped (checked above), and by the rings' protocol its writer does not touch a
        // published slot before the reader releases it, which needs the reader's link mutably and so ends this
        // borrow first.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(offset), length) }
    }
}
