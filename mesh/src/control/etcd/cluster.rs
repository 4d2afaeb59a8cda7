//! A cluster of etcd: its endpoints, and the files and names for a connection to one of them.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rustls::pki_types::ServerName;

use crate::Error;
use crate::control::dial::{self, Session};
use crate::tls;

/// A cluster of etcd.
#[derive(Clone, Debug)]
pub struct Etcd {
    /// Each is `http://host:port` or `https://host:port`. The first to answer is used.
    pub endpoints: Vec<String>,
    /// Certificates of the authority of etcd's certificate, in PEM. Required for https.
    pub ca: Option<PathBuf>,
    /// This node's certificate for etcd and its key, in PEM, if etcd requires one.
    pub certificate: Option<(PathBuf, PathBuf)>,
    /// A user and the file with the password, if etcd requires them.
    pub user: Option<(String, PathBuf)>,
    /// How long a registration outlives its node, in whole seconds.
    pub ttl: Duration,
}

// === impl Etcd ===

impl Etcd {
    /// Checks the endpoints and their files.
    pub(in crate::control) fn check(&self) -> Result<(), Error> {
        let all = self.endpoints.iter().try_for_each(|endpoint| self.endpoint(endpoint).map(drop));
        if self.endpoints.is_empty() {
            let problem = "is not an endpoint of etcd: pass at least one, as http://host:port";
            return Err(Error::Address { address: String::new(), problem });
        }
        if let Some((_, file)) = &self.user {
            password(file)?;
        }
        all
    }

    /// The address of an endpoint, and its TLS settings. Reads the certificates at each call.
    pub(in crate::control) fn endpoint(&self, endpoint: &str) -> Result<(String, Session), Error> {
        let wrong = |problem| Error::Address { address: endpoint.into(), problem };
        let Some((scheme, rest)) = endpoint.split_once("://") else {
            return Err(wrong("is not an endpoint of etcd: pass http://host:port or https://host:port"));
        };
        let address = rest.trim_end_matches('/');
        dial::check(address)
            .map_err(|_| wrong("is not an endpoint of etcd: pass http://host:port or https://host:port"))?;
        match (scheme, &self.ca) {
            ("http", None) => Ok((address.into(), None)),
            ("http", Some(_)) => {
                Err(wrong("would not be encrypted, although --etcd-ca is given: pass https://"))
            }
            ("https", Some(ca)) => {
                let files = self.certificate.as_ref().map(|(certificate, key)| (&**certificate, &**key));
                let config = tls::outward(ca, files)?;
                let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
                let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
                let name = ServerName::try_from(host).map_err(|_| wrong("names no host"))?;
                Ok((address.into(), Some((config, name))))
            }
            ("https", None) => Err(wrong("needs the certificate of its CA: pass --etcd-ca")),
            _ => Err(wrong("is not an endpoint of etcd: pass http://host:port or https://host:port")),
        }
    }

    /// Reads the password file; returns the user's name and password.
    pub(in crate::control) fn credentials(&self) -> Result<Option<(String, String)>, Error> {
        self.user.as_ref().map(|(user, file)| Ok((user.clone(), password(file)?))).transpose()
    }
}

fn password(file: &Path) -> Result<String, Error> {
    let problem = |problem| Error::File { path: file.to_owned(), problem };
    let text = std::fs::read_to_string(file)
        .map_err(|error| problem(format!("cannot be read ({error}): pass a file with etcd's password")))?;
    Ok(text.trim_end_matches(['\r', '\n']).to_owned())
}
