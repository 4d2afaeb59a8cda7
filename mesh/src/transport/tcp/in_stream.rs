//! The data path whose blocks follow on the stream itself.

use std::sync::Arc;

use super::data_path::{ConnectedFetch, DataPath};
use super::link::PeerLink;
use super::wire::Wire;
use super::{TcpShared, fetch, serve};
use crate::refusals::Reason;
use crate::transport::FetchFault;

/// Blocks follow on the stream itself.
pub(in crate::transport) struct InStream;

// === impl InStream ===

impl DataPath for InStream {
    fn fetch(
        &self,
        number: usize,
        shared: &Arc<TcpShared>,
        link: &Arc<PeerLink>,
        wire: Wire,
    ) -> Result<Box<dyn ConnectedFetch>, FetchFault> {
        Ok(Box::new(fetch::Exchange::new(number, Arc::clone(shared), Arc::clone(link), wire)))
    }

    fn serve_stream(&self, shared: &TcpShared, link: Arc<PeerLink>, wire: Wire) {
        serve::ServingStream::new(shared, link, wire).map_or_else(
            |error| {
                shared.count_refusal(Reason::Resources);
                shared.report_note(error.to_string());
            },
            serve::ServingStream::serve_stream,
        );
    }
}
