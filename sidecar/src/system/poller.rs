//! epoll, with the process's descriptors named by their role.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::time::Timespec;

/// Events taken at once; the next call takes the rest.
const EVENTS: usize = 64;

/// The role of a descriptor for the data thread.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum PollSource {
    Listener,
    /// A request from outside waits.
    Inbox,
    Copies,
    /// A disk has a result.
    Disks,
    Checksums,
    /// The mesh has an event.
    Mesh,
    /// A client without a hello.
    Greeting(u64),
    Doorbell(u64),
    Socket(u64),
    Process(u64),
}

/// The descriptors that wake the data thread.
#[derive(Debug)]
pub struct Poller {
    epoll: OwnedFd,
}

// === impl PollSource ===

impl PollSource {
    /// The role in the low 4 bits; ids count up from 1 and never reach 2^60.
    fn token(self) -> u64 {
        match self {
            Self::Listener => 0,
            Self::Inbox => 1,
            Self::Copies => 2,
            Self::Greeting(id) => id << 4 | 3,
            Self::Doorbell(id) => id << 4 | 4,
            Self::Socket(id) => id << 4 | 5,
            Self::Disks => 6,
            Self::Mesh => 7,
            Self::Process(id) => id << 4 | 8,
            Self::Checksums => 9,
        }
    }

    fn from_token(token: u64) -> Self {
        match token & 15 {
            0 => Self::Listener,
            1 => Self::Inbox,
            2 => Self::Copies,
            3 => Self::Greeting(token >> 4),
            4 => Self::Doorbell(token >> 4),
            5 => Self::Socket(token >> 4),
            6 => Self::Disks,
            7 => Self::Mesh,
            8 => Self::Process(token >> 4),
            9 => Self::Checksums,
            10.. => unreachable!("no role has this number"),
        }
    }

    /// Eventfds are edge-triggered and never read: a client holds the same eventfd and could empty it between
    /// the event and a read, which would then block.
    fn flags(self) -> EventFlags {
        match self {
            Self::Listener | Self::Greeting(_) | Self::Socket(_) => EventFlags::IN | EventFlags::RDHUP,
            Self::Process(_) => EventFlags::IN,
            Self::Inbox | Self::Copies | Self::Disks | Self::Checksums | Self::Mesh | Self::Doorbell(_) => {
                EventFlags::IN | EventFlags::ET
            }
        }
    }
}

// === impl Poller ===

impl Poller {
    /// A poller that watches nothing.
    pub fn new() -> Result<Self, Errno> {
        Ok(Self { epoll: epoll::create(CreateFlags::CLOEXEC)? })
    }

    pub fn add_source(&self, source: PollSource, fd: impl AsFd) -> Result<(), Errno> {
        epoll::add(&self.epoll, fd, EventData::new_u64(source.token()), source.flags())
    }

    /// Ends the watch. Closing the descriptor would not end it if a client holds the same open file.
    pub fn remove(&self, fd: impl AsFd) {
        // The descriptor may not be watched; the result is the same.
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Sleeps until an event or for `nap` (`None`: without limit), then appends the events.
    pub fn wait_events(&self, nap: Option<Duration>, out: &mut Vec<PollSource>) -> Result<(), Errno> {
        // epoll's own timeouts are whole milliseconds before Linux 5.11; ppoll's are nanoseconds everywhere.
        if nap != Some(Duration::ZERO) {
            let limit = nap.map(|nap| Timespec {
                tv_sec: i64::try_from(nap.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: i64::from(nap.subsec_nanos()),
            });
            match rustix::event::poll(&mut [PollFd::new(&self.epoll, PollFlags::IN)], limit.as_ref()) {
                Ok(0) | Err(Errno::INTR) => return Ok(()),
                polled => polled?,
            };
        }
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut space = [MaybeUninit::<Event>::uninit(); EVENTS];
        let events = match epoll::wait(&self.epoll, &mut space, Some(&now)) {
            Err(Errno::INTR) => return Ok(()),
            waited => waited?.0,
        };
        out.extend(events.iter().map(|event| PollSource::from_token(event.data.u64())));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_name_their_source() {
        use PollSource::{
            Checksums, Copies, Disks, Doorbell, Greeting, Inbox, Listener, Mesh, Process, Socket,
        };
        for source in [
            Listener,
            Inbox,
            Copies,
            Disks,
            Checksums,
            Mesh,
            Greeting(1),
            Doorbell(1),
            Socket(1 << 59),
            Doorbell((1 << 60) - 1),
            Process(1),
        ] {
            assert_eq!(PollSource::from_token(source.token()), source);
        }
    }
}
