//! The core's session over this process' connections, and a connection's words for a GPU's streams.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use copy_engine::cuda::{CudaError, Gpu};

use crate::clock;
use crate::connection::Connection;
use crate::core::worker::{self, link, load};
use crate::pool::MappedPool;
use crate::stream::SessionWords;

use crate::core::worker::watch::SETTLE;

/// Time between two looks while a load settles.
const SETTLE_POLL: Duration = Duration::from_micros(50);

pub(super) type Session = worker::RankSession<RankConnection, Arc<MappedPool>>;
pub(super) type Link = link::RankLink<RankConnection>;
pub(super) type Job = load::LoadJob<RankConnection, Arc<MappedPool>>;
pub(super) type Next = load::NextLoadStep<RankConnection, Arc<MappedPool>>;

/// A connection, and its words for the GPU's streams.
#[derive(Debug)]
pub(super) struct RankConnection {
    connection: Arc<Connection>,
    words: Option<SessionWords>,
}

// === impl RankConnection ===

impl RankConnection {
    /// Shows the words to the GPU with the rank's memory, if there is one.
    pub(super) fn new(connection: Arc<Connection>, gpu: Option<&Arc<Gpu>>) -> Result<Self, CudaError> {
        let words = gpu.map(|gpu| SessionWords::new(gpu, &connection.memory)).transpose()?;
        Ok(Self { connection, words })
    }

    /// The words for streams to write and wait on. Only a rank on a GPU may call this: it has them on every
    /// connection.
    pub(super) fn words(&self) -> &SessionWords {
        self.words.as_ref().expect("a rank with GPU memory")
    }
}

impl Deref for RankConnection {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        &self.connection
    }
}

/// Host memory: waits until the sidecar no longer writes blocks of a revoked load.
pub(super) fn settle_job(job: &Job) {
    let deadline = clock::read_clock() + SETTLE;
    while job.must_settle() && clock::read_clock() < deadline {
        std::thread::sleep(SETTLE_POLL);
    }
}
