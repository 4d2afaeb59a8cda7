//! Ways for the bytes of a block from the granted slot to the slot of the fetch.

use std::sync::Arc;

use super::Shared;
use super::link::Link;
use super::piece::Piece;
use super::wire::Wire;
use crate::transport::Fault;

/// Makes both ends of a stream, after the greeting.
pub(in crate::transport) trait Carriage: Send + Sync {
    /// Makes the asking end of stream `number` to a member.
    fn fetch(
        &self,
        number: usize,
        shared: &Arc<Shared>,
        link: &Arc<Link>,
        wire: Wire,
    ) -> Result<Box<dyn Fetching>, Fault>;

    /// Serves a member's stream as the answering end, until it ends.
    fn serve(&self, shared: &Shared, link: Arc<Link>, wire: Wire);
}

/// The asking end of a connected stream.
pub(in crate::transport) trait Fetching: Send {
    /// True unless the peer hung up, or sent something without an ask.
    fn quiet(&mut self) -> bool;
    /// Fetches `piece` and pieces waiting in the link meanwhile, until none waits. After an error the stream
    /// is unusable.
    fn run(&mut self, piece: Piece) -> Result<(), Fault>;
    /// Hangs up, so no slot is written from now on. Returns the pieces not fetched.
    fn hang_up(self: Box<Self>) -> Vec<Piece>;
}
