//! How the bytes of a block get from the slot that was granted into the one that waits for them.

use std::sync::Arc;

use super::Shared;
use super::link::Link;
use super::piece::Piece;
use super::wire::Wire;
use crate::transport::Fault;

/// Makes both ends of a stream, once the two sides know each other.
pub(in crate::transport) trait Carriage: Send + Sync {
    /// Stream `number` to a member, as the side that asks.
    fn fetch(
        &self,
        number: usize,
        shared: &Arc<Shared>,
        link: &Arc<Link>,
        wire: Wire,
    ) -> Result<Box<dyn Fetching>, Fault>;

    /// A stream of a member, as the side that answers, until it ends.
    fn serve(&self, shared: &Shared, link: Arc<Link>, wire: Wire);
}

/// A connected stream of the side that asks.
pub(in crate::transport) trait Fetching: Send {
    /// Whether the peer has neither hung up nor spoken while nothing was asked.
    fn quiet(&mut self) -> bool;
    /// Fetches `piece` and what waits in the link meanwhile, until nothing does. After an error the stream is of no use.
    fn run(&mut self, piece: Piece) -> Result<(), Fault>;
    /// Hangs up, so that nothing is written to a slot from now on, and gives back what was not fetched.
    fn hang_up(self: Box<Self>) -> Vec<Piece>;
}
