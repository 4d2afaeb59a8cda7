//! Sockets to which peers connect.

use std::net::{SocketAddr, TcpListener};

use crate::Error;

/// Binds a non-blocking listener. Returns it and its address, with a port chosen by the kernel if `wanted`
/// has port 0.
pub(crate) fn listen(wanted: SocketAddr) -> Result<(TcpListener, SocketAddr), Error> {
    let unheard = |source| Error::Listen { address: wanted, source };
    let listener = TcpListener::bind(wanted).map_err(unheard)?;
    listener.set_nonblocking(true).map_err(unheard)?;
    let address = listener.local_addr().map_err(unheard)?;
    Ok((listener, address))
}
