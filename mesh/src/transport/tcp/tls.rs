//! Mutual TLS: certificate, key and authority from PEM files, read again when they change.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{
    ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection, version,
};

use crate::Error;

/// What TLS is made of. The authority is the mesh's own: whoever has a certificate of it may ask for blocks.
#[derive(Clone, Debug)]
pub struct Tls {
    /// This node's certificate and what leads from it to the authority, in PEM.
    pub certificate: PathBuf,
    /// Its private key, in PEM.
    pub key: PathBuf,
    /// Certificates of the authority, in PEM.
    pub ca: PathBuf,
    /// The DNS name or IP address that the certificate of every node carries.
    pub name: String,
}

/// What tells one content of a file from another without reading it: device, inode, length, time of change.
type Stamp = [(u64, u64, u64, i64, i64); 3];

/// The files, as they were read last.
#[derive(Debug)]
pub(super) struct Credentials {
    files: Tls,
    name: ServerName<'static>,
    last: Mutex<Last>,
}

#[derive(Debug)]
struct Last {
    /// When they were looked at last; another one means that something has changed.
    stamp: Stamp,
    sides: Sides,
    /// What was said of files that cannot be used.
    told: Option<String>,
}

#[derive(Clone, Debug)]
struct Sides {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

// === impl Credentials ===

impl Credentials {
    pub(super) fn read(files: Tls) -> Result<Self, Error> {
        let name = ServerName::try_from(files.name.clone());
        let name = name.map_err(|_| Error::CertificateName(files.name.clone()))?;
        let stamp = files.stamp()?;
        let sides = Sides::read(&files)?;
        Ok(Self { files, name, last: Mutex::new(Last { stamp, sides, told: None }) })
    }

    /// A session as the side that connects.
    pub(super) fn connect(&self, note: impl FnOnce(String)) -> Result<Connection, rustls::Error> {
        let sides = self.sides(note);
        Ok(ClientConnection::new(sides.client, self.name.clone())?.into())
    }

    /// A session as the side that is connected to.
    pub(super) fn accept(&self, note: impl FnOnce(String)) -> Result<Connection, rustls::Error> {
        let sides = self.sides(note);
        Ok(ServerConnection::new(sides.server)?.into())
    }

    /// What the files hold now; where that cannot be used, what they held before, and a note, once.
    fn sides(&self, note: impl FnOnce(String)) -> Sides {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let read = self.files.stamp().and_then(|stamp| {
            if stamp != last.stamp {
                last.stamp = stamp;
                last.sides = Sides::read(&self.files)?;
            }
            Ok(())
        });
        // A file that is missing is looked for at every connection: it is about to be replaced.
        match read {
            Ok(()) => last.told = None,
            Err(error) => {
                let text = format!("{error}; the certificates read before stay in use");
                if last.told.as_ref() != Some(&text) {
                    note(text.clone());
                    last.told = Some(text);
                }
            }
        }
        last.sides.clone()
    }
}

// === impl Tls ===

impl Tls {
    fn stamp(&self) -> Result<Stamp, Error> {
        let stamp = |path: &Path| {
            let metadata = std::fs::metadata(path).map_err(|error| unreadable(path, &error))?;
            Ok(stamp_of(&metadata))
        };
        Ok([stamp(&self.certificate)?, stamp(&self.key)?, stamp(&self.ca)?])
    }
}

fn stamp_of(metadata: &Metadata) -> (u64, u64, u64, i64, i64) {
    (metadata.dev(), metadata.ino(), metadata.len(), metadata.mtime(), metadata.mtime_nsec())
}

// === impl Sides ===

impl Sides {
    fn read(files: &Tls) -> Result<Self, Error> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let roots = Arc::new(authority(&files.ca)?);
        let chain = certificates(&files.certificate)?;
        let key = PrivateKeyDer::from_pem_file(&files.key).map_err(|error| {
            let remedy = "give this node's private key in PEM (PKCS#8, PKCS#1 or SEC1), not encrypted";
            file(&files.key, format!("holds no private key ({error}): {remedy}"))
        })?;
        let unusable = |error: rustls::Error| {
            let key = files.key.display();
            file(
                &files.certificate,
                format!("does not go with the key {key} ({error}): give the two of one node"),
            )
        };
        let client = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&version::TLS13])
            .map_err(unusable)?
            .with_root_certificates(Arc::clone(&roots))
            .with_client_auth_cert(chain.clone(), key.clone_key())
            .map_err(unusable)?;
        let server =
            Self::server(provider, roots, &files.ca)?.with_single_cert(chain, key).map_err(unusable)?;
        Ok(Self { client: Arc::new(client), server: Arc::new(no_tickets(server)) })
    }

    fn server(
        provider: Arc<CryptoProvider>,
        roots: Arc<RootCertStore>,
        ca: &Path,
    ) -> Result<rustls::ConfigBuilder<ServerConfig, rustls::server::WantsServerCert>, Error> {
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider)).build();
        let verifier =
            verifier.map_err(|error| file(ca, format!("is no authority ({error}): give the mesh's CA")))?;
        let builder =
            ServerConfig::builder_with_provider(provider).with_protocol_versions(&[&version::TLS13]);
        let builder = builder.map_err(|error| file(ca, format!("cannot be used ({error})")))?;
        Ok(builder.with_client_cert_verifier(verifier))
    }
}

/// Without tickets an idle connection has nothing to read, which is how a side knows that the other has not hung up;
/// and a session is never resumed under a certificate that was replaced.
fn no_tickets(mut server: ServerConfig) -> ServerConfig {
    server.send_tls13_tickets = 0;
    server
}

fn authority(path: &Path) -> Result<RootCertStore, Error> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        let added = roots.add(certificate);
        added.map_err(|error| {
            file(path, format!("holds a certificate that is none ({error}): give the mesh's CA"))
        })?;
    }
    Ok(roots)
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Error> {
    let bytes = std::fs::read(path).map_err(|error| unreadable(path, &error))?;
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    let remedy = "give certificates in PEM (-----BEGIN CERTIFICATE-----)";
    let read = read.map_err(|error| file(path, format!("is no PEM file ({error}): {remedy}")))?;
    if read.is_empty() { Err(file(path, format!("holds no certificate: {remedy}"))) } else { Ok(read) }
}

fn unreadable(path: &Path, error: &io::Error) -> Error {
    file(path, format!("cannot be read ({error}): give a file that this process may read"))
}

fn file(path: &Path, problem: String) -> Error {
    Error::File { path: path.to_owned(), problem }
}
