//! Mutual TLS: certificate, key and authority from PEM files, read again when they change. A node has one
//! certificate for its blocks and its control service.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier as _;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::{
    ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection, version,
};

use crate::Error;
use crate::sync::lock;

/// The security of a mesh's connections. There is no default.
#[derive(Clone, Debug)]
pub enum Security {
    Tls(Tls),
    /// Any host that reaches the port and knows a member's name may request blocks, and any host on the path
    /// may read them.
    Plaintext,
}

/// Files for TLS. The authority belongs to the mesh alone: every holder of its certificates may request
/// blocks.
#[derive(Clone, Debug)]
pub struct Tls {
    /// This node's certificate and the chain from it to the authority, in PEM.
    pub certificate: PathBuf,
    /// Its private key, in PEM.
    pub key: PathBuf,
    /// Certificates of the authority, in PEM.
    pub ca: PathBuf,
    /// The DNS name or IP address in the certificate of every node.
    pub name: String,
}

/// The remedy sent to peers with a refused certificate.
pub(crate) const REMEDY: &str = "give both nodes unexpired certificates of one CA that carry the agreed name";

/// Distinguishes contents of the files without reading them: device, inode, length, time of change.
type Stamp = [(u64, u64, u64, i64, i64); 3];

/// The files, as read last.
#[derive(Debug)]
pub(crate) struct Credentials {
    files: Tls,
    name: ServerName<'static>,
    last: Mutex<Last>,
}

#[derive(Debug)]
struct Last {
    /// The stamp at the last read; another one means a change.
    stamp: Stamp,
    sides: Sides,
    /// The last note about unusable files.
    told: Option<String>,
}

#[derive(Clone, Debug)]
struct Sides {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

// === impl Security ===

impl Security {
    /// The certificates of this node's sessions; `None` for plaintext.
    pub(crate) fn credentials(&self) -> Result<Option<Credentials>, Error> {
        match self {
            Self::Tls(files) => Ok(Some(Credentials::read(files.clone())?)),
            Self::Plaintext => Ok(None),
        }
    }
}

// === impl Credentials ===

impl Credentials {
    fn read(files: Tls) -> Result<Self, Error> {
        let name = ServerName::try_from(files.name.clone());
        let name = name.map_err(|_| Error::CertificateName(files.name.clone()))?;
        let stamp = files.stamp()?;
        let sides = Sides::read(&files)?;
        Ok(Self { files, name, last: Mutex::new(Last { stamp, sides, told: None }) })
    }

    /// A session of the connecting side.
    pub(crate) fn connect(&self, note: impl FnOnce(String)) -> Result<Connection, rustls::Error> {
        let (config, name) = self.client(note);
        Ok(ClientConnection::new(config, name)?.into())
    }

    /// A session of the accepting side.
    pub(crate) fn accept(&self, note: impl FnOnce(String)) -> Result<Connection, rustls::Error> {
        Ok(ServerConnection::new(self.server(note))?.into())
    }

    /// The settings of the connecting side, and the name required in the peer's certificate.
    pub(crate) fn client(&self, note: impl FnOnce(String)) -> (Arc<ClientConfig>, ServerName<'static>) {
        (self.sides(note).client, self.name.clone())
    }

    /// The settings of the accepting side.
    pub(crate) fn server(&self, note: impl FnOnce(String)) -> Arc<ServerConfig> {
        self.sides(note).server
    }

    /// The settings from the current files. If those are unusable, the previous settings, and one note.
    fn sides(&self, note: impl FnOnce(String)) -> Sides {
        let mut last = lock(&self.last);
        let read = self.files.stamp().and_then(|stamp| {
            if stamp != last.stamp {
                last.sides = Sides::read(&self.files)?;
                // Set after the read: unusable files are read again at the next connection, changed or not.
                last.stamp = stamp;
            }
            Ok(())
        });
        // A missing file is looked for at every connection: it is about to be replaced.
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
    /// Checks that peers with files of the same authority accept this node's certificate now, on both sides
    /// of a connection.
    pub fn check(&self) -> Result<(), Error> {
        let name = Credentials::read(self.clone())?.name;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let roots = Arc::new(authority(&self.ca)?);
        let unusable =
            |error| file(&self.ca, format!("is not a CA certificate ({error}): pass the mesh's CA"));
        let client = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider));
        let client = client.build().map_err(unusable)?;
        let server =
            WebPkiServerVerifier::builder_with_provider(roots, provider).build().map_err(unusable)?;
        let chain = certificates(&self.certificate)?;
        let (own, rest) = chain.split_first().expect("a file without a certificate is an error");
        let now = UnixTime::now();
        let accepted = client.verify_client_cert(own, rest, now).map(drop);
        let accepted =
            accepted.and_then(|()| server.verify_server_cert(own, rest, &name, &[], now).map(drop));
        accepted
            .map_err(|error| file(&self.certificate, format!("would not be accepted ({error}): {REMEDY}")))
    }

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
        let key = private_key(&files.key)?;
        let unusable = |error: rustls::Error| mismatch(&files.certificate, &files.key, &error);
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
        let verifier = verifier
            .map_err(|error| file(ca, format!("is not a CA certificate ({error}): pass the mesh's CA")))?;
        let builder =
            ServerConfig::builder_with_provider(provider).with_protocol_versions(&[&version::TLS13]);
        let builder = builder.map_err(|error| file(ca, format!("cannot be used ({error})")))?;
        Ok(builder.with_client_cert_verifier(verifier))
    }
}

/// Settings for a server of another authority, with this node's certificate if the server requires one, and
/// HTTP/2.
#[cfg(feature = "etcd")]
pub(crate) fn outward(ca: &Path, own: Option<(&Path, &Path)>) -> Result<Arc<ClientConfig>, Error> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider).with_protocol_versions(&[&version::TLS13]);
    let builder = builder.map_err(|error| file(ca, format!("cannot be used ({error})")))?;
    let builder = builder.with_root_certificates(authority(ca)?);
    let mut config = match own {
        Some((certificate, key)) => builder
            .with_client_auth_cert(certificates(certificate)?, private_key(key)?)
            .map_err(|error| mismatch(certificate, key, &error))?,
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Arc::new(config))
}

/// Without tickets an idle connection has nothing to read, so a side can tell that the other has not hung up.
/// And no session is resumed under a replaced certificate.
fn no_tickets(mut server: ServerConfig) -> ServerConfig {
    server.send_tls13_tickets = 0;
    server
}

fn authority(path: &Path) -> Result<RootCertStore, Error> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        let added = roots.add(certificate);
        added.map_err(|error| {
            file(path, format!("holds an invalid certificate ({error}): pass the mesh's CA"))
        })?;
    }
    Ok(roots)
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Error> {
    let bytes = std::fs::read(path).map_err(|error| unreadable(path, &error))?;
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    let remedy = "pass certificates in PEM (-----BEGIN CERTIFICATE-----)";
    let read = read.map_err(|error| file(path, format!("is not a PEM file ({error}): {remedy}")))?;
    if read.is_empty() { Err(file(path, format!("holds no certificate: {remedy}"))) } else { Ok(read) }
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, Error> {
    PrivateKeyDer::from_pem_file(path).map_err(|error| {
        let remedy = "pass this node's private key in PEM (PKCS#8, PKCS#1 or SEC1), not encrypted";
        file(path, format!("holds no private key ({error}): {remedy}"))
    })
}

fn mismatch(certificate: &Path, key: &Path, error: &rustls::Error) -> Error {
    let key = key.display();
    file(
        certificate,
        format!("does not belong to the key {key} ({error}): pass the certificate and the key of one node"),
    )
}

fn unreadable(path: &Path, error: &io::Error) -> Error {
    file(path, format!("cannot be read ({error}): pass a file that this process may read"))
}

fn file(path: &Path, problem: String) -> Error {
    Error::File { path: path.to_owned(), problem }
}
