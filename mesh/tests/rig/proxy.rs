//! A TCP proxy with troubles of real networks, at chosen bytes of a stream.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use shm_protocol::random::Random;

/// Bytes passed on at once.
const CHUNK: usize = 16 << 10;
/// Time between two checks of a stalled stream for the end of the test.
const LOOK: Duration = Duration::from_millis(20);

/// A trouble of one direction of a stream.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum Trouble {
    /// These bits of the byte at this place change.
    Flip(u64, u8),
    /// From this byte on nothing passes.
    Stall(u64),
    /// From this byte on, so many bytes pass at a time, with a pause after each.
    Drip(u64, usize, Duration),
    /// Both directions end at this byte.
    Cut(u64),
    /// This direction ends at this byte.
    HalfClose(u64),
    /// Every chunk is late by this time.
    Delay(Duration),
}

/// The troubles of both directions of a connection.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(crate) struct Troubles {
    pub(crate) up: Vec<Trouble>,
    pub(crate) down: Vec<Trouble>,
}

/// The proxy. Dropping it ends all connections.
pub(crate) struct Proxy {
    pub(crate) address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    to: SocketAddr,
    troubles: Mutex<Troubles>,
    ended: AtomicBool,
    streams: Mutex<Vec<TcpStream>>,
}

// === impl Troubles ===

impl Troubles {
    pub(crate) fn down(trouble: Trouble) -> Self {
        Self { up: Vec::new(), down: vec![trouble] }
    }

    pub(crate) fn up(trouble: Trouble) -> Self {
        Self { up: vec![trouble], down: Vec::new() }
    }

    /// One or two troubles somewhere in the first `bytes` bytes.
    pub(crate) fn seeded(seed: u64, bytes: u64) -> Self {
        let mut random = Random(seed);
        let mut troubles = Self::default();
        for _ in 0..=random.below(2) {
            // Asks are few bytes, blocks are many; the begin of a stream has the most to break.
            let down = random.below(4) > 0;
            let span = if down { bytes } else { 4096 };
            let at = if random.below(2) == 0 { random.below(256) } else { random.below(span) };
            let trouble = match random.below(6) {
                0 | 1 => Trouble::Flip(at, 1 << random.below(8)),
                2 => Trouble::Stall(at),
                3 => Trouble::Cut(at),
                4 => Trouble::HalfClose(at),
                _ => Trouble::Drip(at, 1 + random.below(4096) as usize, Duration::from_millis(1)),
            };
            if down { troubles.down.push(trouble) } else { troubles.up.push(trouble) }
        }
        troubles
    }
}

// === impl Proxy ===

impl Proxy {
    pub(crate) fn start(to: SocketAddr, troubles: Troubles) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            to,
            troubles: Mutex::new(troubles),
            ended: AtomicBool::new(false),
            streams: Mutex::default(),
        });
        let own = Arc::clone(&shared);
        std::thread::spawn(move || {
            for from in listener.incoming() {
                if own.ended.load(Ordering::Relaxed) {
                    break;
                }
                own.connect(from.unwrap());
            }
        });
        Self { address, shared }
    }

    /// Sets the troubles of new connections.
    pub(crate) fn trouble(&self, troubles: Troubles) {
        *self.shared.troubles.lock().unwrap() = troubles;
    }

    /// Ends all connections there are.
    pub(crate) fn cut(&self) {
        for stream in self.shared.streams.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::Relaxed);
        self.cut();
        let _ = TcpStream::connect(self.address);
    }
}

// === impl Shared ===

impl Shared {
    fn connect(self: &Arc<Self>, from: TcpStream) {
        let Ok(to) = TcpStream::connect(self.to) else { return };
        let both = self.troubles.lock().unwrap().clone();
        for (from, to, troubles) in [(&from, &to, both.up), (&to, &from, both.down)] {
            let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
            self.streams.lock().unwrap().push(from.try_clone().unwrap());
            let own = Arc::clone(self);
            std::thread::spawn(move || {
                // One side has gone, so the other is closed too.
                if own.pump(&from, &to, &troubles).is_none() {
                    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
                }
            });
        }
    }

    /// Passes bytes on. Returns `None` if both directions are to end.
    fn pump(&self, mut from: &TcpStream, mut to: &TcpStream, troubles: &[Trouble]) -> Option<()> {
        let mut buffer = [0; CHUNK];
        let mut at = 0;
        loop {
            let (mut len, mut pause) = (CHUNK, Duration::ZERO);
            for trouble in troubles {
                // Troubles from a byte on begin at the start of a chunk.
                match trouble {
                    Trouble::Flip(..) => {}
                    Trouble::Delay(delay) => pause += *delay,
                    Trouble::Stall(begin)
                    | Trouble::Drip(begin, ..)
                    | Trouble::Cut(begin)
                    | Trouble::HalfClose(begin)
                        if at < *begin =>
                    {
                        len = len.min((*begin - at) as usize);
                    }
                    Trouble::Stall(_) => {
                        while !self.ended.load(Ordering::Relaxed) {
                            std::thread::sleep(LOOK);
                        }
                        return None;
                    }
                    Trouble::Drip(_, bytes, each) => {
                        len = len.min(*bytes);
                        pause += *each;
                    }
                    Trouble::Cut(_) => return None,
                    Trouble::HalfClose(_) => {
                        let _ = to.shutdown(Shutdown::Write);
                        return Some(());
                    }
                }
            }
            let read = from.read(&mut buffer[..len]).ok()?;
            if read == 0 {
                let _ = to.shutdown(Shutdown::Write);
                return Some(());
            }
            for trouble in troubles {
                if let Trouble::Flip(place, bits) = trouble
                    && (at..at + read as u64).contains(place)
                {
                    buffer[(*place - at) as usize] ^= bits;
                }
            }
            std::thread::sleep(pause);
            to.write_all(&buffer[..read]).ok()?;
            at += read as u64;
        }
    }
}
