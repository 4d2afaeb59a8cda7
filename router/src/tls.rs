//! TLS towards engines and clients, by PEM files.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use super::RouteOptions;

/// The protocol inside of TLS, at both sides.
const HTTP_1: &[u8] = b"http/1.1";

/// One side of TLS, and its files.
#[derive(Debug)]
pub(super) struct Side<T> {
    files: Vec<PathBuf>,
    make: fn(&[Vec<u8>]) -> Result<T, String>,
    last: Mutex<SideRead<T>>,
}

/// The last contents of a side's files, and the configuration made of them.
#[derive(Debug)]
struct SideRead<T> {
    contents: Vec<Vec<u8>>,
    made: Arc<T>,
}

/// The router as a server.
pub(super) type TowardsClients = Side<ServerConfig>;
/// The router as a client.
pub(super) type TowardsEngines = Side<ClientConfig>;

/// Both sides. Each may be without TLS.
#[derive(Clone, Debug)]
pub(super) struct RouteTls {
    pub(super) clients: Option<Arc<TowardsClients>>,
    pub(super) engines: Option<Arc<TowardsEngines>>,
}

// === impl RouteTls ===

impl RouteTls {
    /// The sides with files in the options.
    pub(super) fn from_options(options: &RouteOptions) -> Result<Self, String> {
        let pair = options.tls_cert.iter().chain(&options.tls_key).cloned().collect();
        let ca = options.engine_ca.iter().cloned().collect();
        Ok(Self { clients: Side::read_files(pair, server)?, engines: Side::read_files(ca, client)? })
    }

    /// Reads all files again, for connections from now on. Returns their errors.
    pub(super) fn refresh_sides(&self) -> Vec<String> {
        let clients = self.clients.as_ref().map_or(Ok(()), |side| side.refresh_files());
        let engines = self.engines.as_ref().map_or(Ok(()), |side| side.refresh_files());
        [clients, engines].into_iter().filter_map(Result::err).collect()
    }
}

// === impl Side ===

impl<T> Side<T> {
    /// The side made by `make` of these files; `None` without files.
    fn read_files(
        files: Vec<PathBuf>,
        make: fn(&[Vec<u8>]) -> Result<T, String>,
    ) -> Result<Option<Arc<Self>>, String> {
        if files.is_empty() {
            return Ok(None);
        }
        let contents = contents(&files)?;
        let made = Arc::new(make(&contents).map_err(|error| name_files(&files, &error))?);
        Ok(Some(Arc::new(Self { files, make, last: Mutex::new(SideRead { contents, made }) })))
    }

    /// The configuration of new connections.
    pub(super) fn current(&self) -> Arc<T> {
        Arc::clone(&self.last.lock().unwrap_or_else(PoisonError::into_inner).made)
    }

    /// Reads the files again. Malformed files change nothing.
    fn refresh_files(&self) -> Result<(), String> {
        let contents = contents(&self.files)?;
        if self.last.lock().unwrap_or_else(PoisonError::into_inner).contents == contents {
            return Ok(());
        }
        let made = Arc::new((self.make)(&contents).map_err(|error| name_files(&self.files, &error))?);
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = SideRead { contents, made };
        tracing::info!(files = ?self.files, "new connections have the certificates that are in their files now");
        Ok(())
    }
}

fn contents(files: &[PathBuf]) -> Result<Vec<Vec<u8>>, String> {
    let read = |file: &PathBuf| {
        std::fs::read(file).map_err(|error| {
            format!("cannot read {}: {error}; name a PEM file that this user may read", file.display())
        })
    };
    files.iter().map(read).collect()
}

/// An error behind the names of its files.
fn name_files(files: &[PathBuf], error: &str) -> String {
    let files: Vec<_> = files.iter().map(|file| file.display().to_string()).collect();
    format!("{}: {error}", files.join(", "))
}

fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let read = read.map_err(|error| format!("a certificate is malformed: {error}; write it as PEM"))?;
    if read.is_empty() { Err("there is no certificate; write one as PEM".into()) } else { Ok(read) }
}

fn server(contents: &[Vec<u8>]) -> Result<ServerConfig, String> {
    let chain = certificates(&contents[0])?;
    let key = PrivateKeyDer::from_pem_slice(&contents[1])
        .map_err(|error| format!("the private key is malformed: {error}; write it as PEM"))?;
    let unfit = |error| format!("the key is not that of the certificate: {error}; give a pair of both");
    let builder = ServerConfig::builder_with_provider(provider()).with_protocol_versions(&[&TLS13]);
    let mut config = builder
        .map_err(|error| error.to_string())?
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .map_err(unfit)?;
    config.alpn_protocols = vec![HTTP_1.into()];
    Ok(config)
}

fn client(contents: &[Vec<u8>]) -> Result<ClientConfig, String> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(&contents[0])? {
        roots.add(certificate).map_err(|error| {
            format!("a certificate is of no authority: {error}; name the authority's own")
        })?;
    }
    let builder = ClientConfig::builder_with_provider(provider()).with_protocol_versions(&[&TLS13]);
    let builder = builder.map_err(|error| error.to_string())?;
    let mut config = builder.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![HTTP_1.into()];
    Ok(config)
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

#[cfg(test)]
pub(crate) mod tests {
    use std::path::Path;

    use rcgen::{CertificateParams, KeyPair};

    use super::*;

    /// The side of a server with a new certificate, in files of this folder.
    pub(crate) fn issued(folder: &Path) -> Arc<TowardsClients> {
        issue(folder);
        let files = ["tls.crt", "tls.key"].map(|name| folder.join(name));
        Side::read_files(files.into(), server).unwrap().unwrap()
    }

    fn issue(folder: &Path) {
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::new(["router".to_owned()]).unwrap().self_signed(&key).unwrap();
        std::fs::write(folder.join("tls.crt"), certificate.pem()).unwrap();
        std::fs::write(folder.join("tls.key"), key.serialize_pem()).unwrap();
    }

    #[test]
    fn changed_files_are_for_new_connections_and_malformed_ones_for_none() {
        let folder = tempfile::tempdir().unwrap();
        let side = issued(folder.path());
        let first = side.current();
        side.refresh_files().unwrap();
        assert!(Arc::ptr_eq(&first, &side.current()), "nothing has changed");
        issue(folder.path());
        side.refresh_files().unwrap();
        let second = side.current();
        assert!(!Arc::ptr_eq(&first, &second));
        for (name, content, why) in [
            ("tls.key", KeyPair::generate().unwrap().serialize_pem(), "give a pair of both"),
            ("tls.key", "no key".into(), "the private key is malformed"),
            ("tls.crt", String::new(), "there is no certificate"),
        ] {
            std::fs::write(folder.path().join(name), content).unwrap();
            let error = side.refresh_files().unwrap_err();
            assert!(error.contains(name) && error.contains(why), "{error}");
            assert!(Arc::ptr_eq(&second, &side.current()));
        }
        std::fs::remove_file(folder.path().join("tls.crt")).unwrap();
        assert!(side.refresh_files().unwrap_err().contains("cannot read"));
        issue(folder.path());
        side.refresh_files().unwrap();
        assert!(!Arc::ptr_eq(&second, &side.current()));
    }
}
