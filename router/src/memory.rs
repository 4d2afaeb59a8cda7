//! The memory for bodies of requests, of one client and of all. No I/O.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The memory for bodies.
#[derive(Debug)]
pub(super) struct BodyMemory {
    bytes_max: usize,
    used: Mutex<UsedMemory>,
}

#[derive(Debug, Default)]
pub(super) struct UsedMemory {
    pub(super) all: usize,
    /// Clients that have some of it.
    pub(super) clients: HashMap<IpAddr, usize>,
}

/// The room of one body, given back on drop.
#[derive(Debug)]
pub(super) struct BodyRoom {
    memory: Arc<BodyMemory>,
    client: IpAddr,
    bytes: usize,
}

/// The limit that leaves no room for a body.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) enum Full {
    All,
    Client,
}

// === impl BodyMemory ===

impl BodyMemory {
    pub(super) fn new(bytes_max: u64) -> Arc<Self> {
        let bytes_max = usize::try_from(bytes_max).unwrap_or(usize::MAX);
        Arc::new(Self { bytes_max, used: Mutex::default() })
    }

    pub(super) fn used(&self) -> MutexGuard<'_, UsedMemory> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// No room yet, for a body of this client.
    pub(super) fn room(self: &Arc<Self>, client: IpAddr) -> BodyRoom {
        BodyRoom { memory: Arc::clone(self), client, bytes: 0 }
    }
}

// === impl BodyRoom ===

impl BodyRoom {
    /// Takes room for so many bytes more.
    pub(super) fn grow(&mut self, bytes: usize) -> Result<(), Full> {
        let mut used = self.memory.used();
        let (all, client) = (used.all + bytes, used.clients.get(&self.client).unwrap_or(&0) + bytes);
        if all > self.memory.bytes_max {
            return Err(Full::All);
        }
        if client > self.memory.bytes_max / 2 {
            return Err(Full::Client);
        }
        used.all = all;
        used.clients.insert(self.client, client);
        self.bytes += bytes;
        Ok(())
    }
}

impl Drop for BodyRoom {
    fn drop(&mut self) {
        let mut used = self.memory.used();
        used.all -= self.bytes;
        let left = used.clients.get(&self.client).map_or(0, |client| client - self.bytes);
        match left {
            0 => _ = used.clients.remove(&self.client),
            left => _ = used.clients.insert(self.client, left),
        }
    }
}
