//! The carriage whose blocks follow on the stream itself.

use std::sync::Arc;

use super::carriage::{Carriage, Fetching};
use super::link::Link;
use super::wire::Wire;
use super::{Shared, fetch, serve};
use crate::refusals::Reason;
use crate::transport::Fault;

/// Blocks follow on the stream itself.
pub(in crate::transport) struct InStream;

// === impl InStream ===

impl Carriage for InStream {
    fn fetch(
        &self,
        _number: usize,
        shared: &Arc<Shared>,
        link: &Arc<Link>,
        wire: Wire,
    ) -> Result<Box<dyn Fetching>, Fault> {
        Ok(Box::new(fetch::Exchange::new(Arc::clone(shared), Arc::clone(link), wire)))
    }

    fn serve(&self, shared: &Shared, link: Arc<Link>, wire: Wire) {
        serve::Stream::new(shared, link, wire).map_or_else(
            |error| {
                shared.count(Reason::Resources);
                shared.note(error.to_string());
            },
            serve::Stream::run,
        );
    }
}
