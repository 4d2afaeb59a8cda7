//! URLs of engines as options and files name them, and the addresses of their hosts.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use hyper::Uri;
use hyper::header::HeaderValue;
use hyper::http::uri::{Authority, Scheme};

/// The URL of an engine's OpenAI server, `http://HOST:PORT` or `https://HOST:PORT`. A name as a host may stand for several engines.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct EngineUrl {
    scheme: Scheme,
    authority: Authority,
}

/// The address of one engine: its URL, and an address of the URL's host.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct EngineAddress {
    pub(super) url: EngineUrl,
    pub(super) socket: SocketAddr,
}

// === impl EngineUrl ===

impl FromStr for EngineUrl {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "\"{text}\" is no engine's address; write http://HOST:PORT or https://HOST:PORT, of vLLM's own server"
            )
        };
        let uri: Uri = text.parse().map_err(|_| wrong())?;
        let parts = uri.into_parts();
        let bare = parts.path_and_query.is_none_or(|path| path.as_str() == "/");
        match (parts.scheme, parts.authority) {
            (Some(scheme), Some(authority))
                if (scheme == Scheme::HTTP || scheme == Scheme::HTTPS)
                    && authority.port_u16().is_some()
                    && bare =>
            {
                Ok(Self { scheme, authority })
            }
            _ => Err(wrong()),
        }
    }
}

impl EngineUrl {
    /// The host, without the brackets of an IPv6 address.
    pub(super) fn host(&self) -> &str {
        self.authority.host().trim_start_matches('[').trim_end_matches(']')
    }

    pub(super) fn port(&self) -> u16 {
        self.authority.port_u16().expect("it was parsed with a port")
    }

    /// Returns true if the router speaks TLS to the engine.
    pub(super) fn is_https(&self) -> bool {
        self.scheme == Scheme::HTTPS
    }

    /// The address of a host without a name.
    pub(super) fn literal(&self) -> Option<SocketAddr> {
        Some(SocketAddr::new(self.host().parse::<IpAddr>().ok()?, self.port()))
    }
}

impl fmt::Display for EngineUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.scheme, self.authority)
    }
}

// === impl EngineAddress ===

impl EngineAddress {
    pub(super) fn new(url: EngineUrl, socket: SocketAddr) -> Self {
        Self { url, socket }
    }

    /// The URI of a path at this engine. Its host, and so the header `Host`, is that of the URL.
    pub(super) fn at(&self, path: &str) -> Result<Uri, hyper::http::Error> {
        let (scheme, authority) = (self.url.scheme.clone(), self.url.authority.clone());
        Uri::builder().scheme(scheme).authority(authority).path_and_query(path).build()
    }

    /// The path of a URL at this engine, by its host's name or address; `None` for any other URL.
    pub(super) fn path_of(&self, url: &str) -> Option<HeaderValue> {
        let url: Uri = url.parse().ok()?;
        let default = if url.scheme() == Some(&Scheme::HTTPS) { 443 } else { 80 };
        let host = url.host()?.trim_start_matches('[').trim_end_matches(']');
        let is_host = host.eq_ignore_ascii_case(self.url.host()) || host.parse() == Ok(self.socket.ip());
        let is_here = is_host && url.port_u16().unwrap_or(default) == self.socket.port();
        is_here.then(|| url.path_and_query()?.as_str().parse().ok()).flatten()
    }
}

impl fmt::Display for EngineAddress {
    /// Writes the URL, and the address behind a name.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.url.literal() {
            Some(_) => self.url.fmt(f),
            None => write!(f, "{} ({})", self.url, self.socket.ip()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_has_a_scheme_a_host_and_a_port_alone() {
        for right in ["http://a:1", "http://a:1/", "http://[::1]:80", "https://a:1"] {
            right.parse::<EngineUrl>().expect(right);
        }
        for wrong in ["a:1", "ftp://a:1", "http://a", "http://a:", "http://a:1/v1", ""] {
            wrong.parse::<EngineUrl>().expect_err(wrong);
        }
        let literal = |text: &str| text.parse::<EngineUrl>().unwrap().literal();
        assert_eq!(literal("http://[::1]:80"), Some("[::1]:80".parse().unwrap()));
        assert_eq!((literal("http://10.0.0.1:80").is_some(), literal("http://a:80")), (true, None));
    }

    #[test]
    fn a_url_of_an_engine_is_known_by_its_host_and_port() {
        let address =
            |url: &str, socket: &str| EngineAddress::new(url.parse().unwrap(), socket.parse().unwrap());
        let named = address("http://engine:8000", "10.0.0.5:8000");
        assert_eq!(named.to_string(), "http://engine:8000 (10.0.0.5)");
        for url in [
            "http://engine:8000/v1/models?a=b",
            "http://ENGINE:8000/v1/models?a=b",
            "http://10.0.0.5:8000/v1/models?a=b",
        ] {
            assert_eq!(named.path_of(url).expect(url), "/v1/models?a=b");
        }
        for url in
            ["http://engine:8001/", "http://engine/", "http://other:8000/", "http://10.0.0.6:8000/", "/v1"]
        {
            assert_eq!(named.path_of(url), None, "{url}");
        }
        let at_default = address("http://[::1]:80", "[::1]:80");
        assert_eq!(at_default.to_string(), "http://[::1]:80");
        assert_eq!(at_default.path_of("http://[::1]/v1").unwrap(), "/v1");
        assert_eq!(at_default.path_of("https://[::1]/v1"), None);
    }
}
