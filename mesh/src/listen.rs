//! Where peers connect to.

use std::net::{SocketAddr, TcpListener};

use crate::Error;

/// A listener that is polled, and its address: the one that is wanted, with a port of its own where that is 0.
pub(crate) fn listen(wanted: SocketAddr) -> Result<(TcpListener, SocketAddr), Error> {
    let unheard = |source| Error::Listen { address: wanted, source };
    let listener = TcpListener::bind(wanted).map_err(unheard)?;
    listener.set_nonblocking(true).map_err(unheard)?;
    let address = listener.local_addr().map_err(unheard)?;
    Ok((listener, address))
}
