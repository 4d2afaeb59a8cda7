//! Ways for the bytes of a block from the granted slot to the slot of the fetch.

use std::sync::Arc;

use super::TcpShared;
use super::link::PeerLink;
use super::piece::FetchPiece;
use super::wire::Wire;
use crate::transport::FetchFault;

/// Makes both ends of a stream, after the greeting.
pub(in crate::transport) trait DataPath: Send + Sync {
    /// Makes the asking end of stream `number` to a member.
    fn fetch(
        &self,
        number: usize,
        shared: &Arc<TcpShared>,
        link: &Arc<PeerLink>,
        wire: Wire,
    ) -> Result<Box<dyn ConnectedFetch>, FetchFault>;

    /// Serves a member's stream as the answering end, until it ends.
    fn serve_stream(&self, shared: &TcpShared, link: Arc<PeerLink>, wire: Wire);
}

/// The asking end of a connected stream.
pub(in crate::transport) trait ConnectedFetch: Send {
    /// True unless the peer hung up, or sent something without an ask.
    fn quiet(&mut self) -> bool;
    /// Fetches `piece` and pieces waiting in the link meanwhile, until none waits. After an error the stream
    /// is unusable.
    fn run_piece(&mut self, piece: FetchPiece) -> Result<(), FetchFault>;
    /// Hangs up, so no slot is written from now on. Returns the pieces not fetched.
    fn hang_up(self: Box<Self>) -> Vec<FetchPiece>;
}
