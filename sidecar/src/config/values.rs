//! Values with units.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;

use serde::Deserialize;

/// The smallest number of bytes accepted without a unit.
const BARE_MIN: u64 = 1 << 20;

/// A number of bytes: `30GiB` and `30GB`, or in Kubernetes notation `30Gi`, `30G` and `32212254720`.
#[derive(Copy, Clone, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd)]
#[serde(try_from = "String")]
pub struct Size(u64);

/// The address of a server.
#[derive(Copy, Clone, Debug, Deserialize, Eq, PartialEq)]
#[serde(try_from = "String")]
pub struct IpPort(pub SocketAddr);

/// A time span, written in `s` or `ms`.
#[derive(Copy, Clone, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd)]
#[serde(try_from = "String")]
pub struct Time(u64);

shm_protocol::named! {
    /// The least severe messages to log.
    #[derive(Deserialize)]
    #[serde(try_from = "String")]
    pub enum Severity {
        /// Failures of the sidecar, or of its use by an engine.
        Error = "error",
        Warn = "warn",
        /// Begins and ends of sessions, and the like.
        Info = "info",
        Debug = "debug",
    }
}

shm_protocol::named! {
    /// The format of log lines.
    #[derive(Deserialize)]
    #[serde(try_from = "String")]
    pub enum LogFormat {
        Text = "text",
        /// A JSON object a line.
        Json = "json",
    }
}

shm_protocol::named! {
    /// The use of GPUs.
    #[derive(Deserialize)]
    #[serde(try_from = "String")]
    pub enum UseGpu {
        /// Every visible GPU; without one like `Off`.
        Auto = "auto",
        /// No GPU; libcuda is not loaded.
        Off = "off",
    }
}

// === impl Size ===

impl Size {
    /// A size of `bytes` bytes.
    pub const fn new(bytes: u64) -> Self {
        Self(bytes)
    }

    pub const fn as_bytes(self) -> u64 {
        self.0
    }
}

impl FromStr for Size {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("\"{text}\" is not a size: write a number and a unit, such as 512MiB, 30GiB or 30Gi");
        // Kubernetes's unit m is a thousandth.
        let parsed = text.parse().ok().filter(|_| !text.ends_with('m'));
        let size: bytesize::ByteSize = parsed.ok_or_else(wrong)?;
        let bytes = size.as_u64();
        // A small bare number is more likely a forgotten unit than bytes.
        match text.ends_with(|end: char| end.is_ascii_digit()) && bytes < BARE_MIN {
            true => Err(format!("\"{text}\" would be {bytes} bytes: write a unit, such as 512MiB or 30GiB")),
            false => Ok(Self(bytes)),
        }
    }
}

/// `512.0 MiB`; `{:#}` has the form of an option, `512MiB`.
impl fmt::Display for Size {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = bytesize::ByteSize::b(self.0).display().iec().to_string();
        formatter.write_str(&if formatter.alternate() { text.replace(".0 ", "") } else { text })
    }
}

// === impl IpPort ===

impl FromStr for IpPort {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            |_| format!("\"{text}\" is not an address: write IP:PORT, such as 0.0.0.0:9440 or [::1]:9440");
        text.parse().map(Self).map_err(wrong)
    }
}

impl fmt::Display for IpPort {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

// === impl Time ===

impl Time {
    /// A span of `millis` milliseconds.
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis)
    }

    /// The span in milliseconds.
    pub const fn as_millis(self) -> u64 {
        self.0
    }
}

impl FromStr for Time {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let parsed = if let Some(number) = text.strip_suffix("ms") {
            number.parse().ok()
        } else {
            text.strip_suffix('s').and_then(|number| number.parse::<u64>().ok()?.checked_mul(1000))
        };
        parsed.map(Self).ok_or_else(|| {
            format!("\"{text}\" is not a time: write whole seconds or milliseconds, such as 30s or 250ms")
        })
    }
}

/// Milliseconds; `{:#}` shows whole seconds in seconds.
impl fmt::Display for Time {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 % 1000 {
            0 if formatter.alternate() => write!(formatter, "{}s", self.0 / 1000),
            _ => write!(formatter, "{}ms", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_the_units_of_people_and_of_kubernetes() {
        let bytes = |text: &str| text.parse::<Size>().map(Size::as_bytes);
        assert_eq!(bytes("30GiB"), Ok(30 << 30));
        assert_eq!(bytes("512MiB"), Ok(512 << 20));
        assert_eq!(bytes("1.5KiB"), Ok(1536));
        assert_eq!(bytes("1MB"), Ok(1_000_000));
        assert_eq!(bytes("30Gi"), Ok(30 << 30));
        assert_eq!(bytes("512Mi"), Ok(512 << 20));
        assert_eq!(bytes("2Ti"), Ok(2 << 40));
        assert_eq!(bytes("30G"), Ok(30_000_000_000));
        assert_eq!(bytes("500M"), Ok(500_000_000));
        assert_eq!(bytes("32212254720"), Ok(30 << 30));
        for wrong in ["30", "", "GiB", "-1GiB", "lots", "30Qi", "512m"] {
            assert!(bytes(wrong).unwrap_err().contains("GiB"), "{wrong}");
        }
    }

    #[test]
    fn an_address_is_an_ip_and_a_port() {
        assert_eq!("[::1]:1".parse::<IpPort>().unwrap().0.port(), 1);
        for wrong in ["9440", "localhost:9440", "127.0.0.1", ""] {
            let text = wrong.parse::<IpPort>().unwrap_err();
            assert!(text.contains("IP:PORT, such as 0.0.0.0:9440"), "{wrong}: {text}");
        }
    }

    #[test]
    fn times_are_whole_seconds_or_milliseconds() {
        let millis = |text: &str| text.parse::<Time>().map(Time::as_millis);
        assert_eq!(millis("30s"), Ok(30_000));
        assert_eq!(millis("250ms"), Ok(250));
        for wrong in ["30", "s", "1.5s", "1m", "18446744073709551615s"] {
            assert!(millis(wrong).is_err(), "{wrong}");
        }
    }
}
