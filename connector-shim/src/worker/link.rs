//! The core's session over this process' connections, and what a GPU's streams reach of one.

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

/// Time between two looks meanwhile.
const SETTLE_POLL: Duration = Duration::from_micros(50);

pub(super) type Session = worker::RankSession<RankConnection, Arc<MappedPool>>;
pub(super) type Link = link::RankLink<RankConnection>;
pub(super) type Job = load::LoadJob<RankConnection, Arc<MappedPool>>;
pub(super) type Next = load::NextLoadStep<RankConnection, Arc<MappedPool>>;

/// A connection, and its words as the GPU's streams reach them.
#[derive(Debug)]
pub(super) struct RankConnection {
    connection: Arc<Connection>,
    words: Option<SessionWords>,
}

// === impl RankConnection ===

impl RankConnection {
    /// Shows the words to the GPU that holds the rank's memory, if one does.
    pub(super) fn new(connection: Arc<Connection>, gpu: Option<&Arc<Gpu>>) -> Result<Self, CudaError> {
        let words = gpu.map(|gpu| SessionWords::new(gpu, &connection.memory)).transpose()?;
        Ok(Self { connection, words })
    }

    /// What streams write and wait on; a rank on a GPU has it on every connection.
    pub(super) fn words(&self) -> &SessionWords {
        self.words.as_ref().expect("a rank whose memory is a GPU's")
    }
}

impl Deref for RankConnection {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        &self.connection
    }
}

/// Host memory: waits until the sidecar writes no block of a load that was taken back.
pub(super) fn settle_job(job: &Job) {
    let deadline = clock::read_clock() + SETTLE;
    while job.must_settle() && clock::read_clock() < deadline {
        std::thread::sleep(SETTLE_POLL);
    }
}
