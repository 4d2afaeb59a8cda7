//! Values with units, as people write them.

use std::fmt;
use std::str::FromStr;

use serde::Deserialize;

/// A number of bytes, written with a unit.
#[derive(Copy, Clone, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd)]
#[serde(try_from = "String")]
pub struct Size(u64);

/// A time span, written in `s` or `ms`.
#[derive(Copy, Clone, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd)]
#[serde(try_from = "String")]
pub struct Time(u64);

/// Least severe messages that are logged.
#[derive(Copy, Clone, Debug, Deserialize, Eq, PartialEq)]
#[serde(try_from = "String")]
pub enum Level {
    /// What stops the sidecar or an engine's use of it.
    Error,
    Warn,
    /// Sessions that come and go.
    Info,
    Debug,
}

/// Whether GPUs are served.
#[derive(Copy, Clone, Debug, Deserialize, Eq, PartialEq)]
#[serde(try_from = "String")]
pub enum UseGpu {
    /// Every GPU that is visible here; without one, as `Off`.
    Auto,
    /// None; libcuda is not even looked for.
    Off,
}

// === impl Size ===

impl Size {
    /// A size of so many bytes.
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
        let wrong = || format!("\"{text}\" is no size; write a number and a unit, such as 512MiB or 30GiB");
        // A bare number is refused: 30 is more likely a forgotten unit than 30 bytes.
        if !text.ends_with(['b', 'B']) {
            return Err(wrong());
        }
        let size: bytesize::ByteSize = text.parse().map_err(|_| wrong())?;
        Ok(Self(size.as_u64()))
    }
}

impl fmt::Display for Size {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        bytesize::ByteSize::b(self.0).display().iec().fmt(formatter)
    }
}

// === impl Time ===

impl Time {
    /// A span of so many milliseconds.
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
        parsed
            .map(Self)
            .ok_or_else(|| format!("\"{text}\" is no time; write whole seconds or milliseconds: 30s, 250ms"))
    }
}

impl fmt::Display for Time {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}ms", self.0)
    }
}

// === impl Level ===

impl FromStr for Level {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "error" => Ok(Self::Error),
            "warn" => Ok(Self::Warn),
            "info" => Ok(Self::Info),
            "debug" => Ok(Self::Debug),
            _ => Err(format!("\"{text}\" is no log level; the levels are error, warn, info, debug")),
        }
    }
}

// === impl UseGpu ===

impl FromStr for UseGpu {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "off" => Ok(Self::Off),
            _ => Err(format!("\"{text}\" says nothing about GPUs; the values are auto, off")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_need_a_unit() {
        let bytes = |text: &str| text.parse::<Size>().map(Size::as_bytes);
        assert_eq!(bytes("30GiB"), Ok(30 << 30));
        assert_eq!(bytes("512MiB"), Ok(512 << 20));
        assert_eq!(bytes("1.5KiB"), Ok(1536));
        assert_eq!(bytes("1MB"), Ok(1_000_000));
        for wrong in ["30", "", "GiB", "-1GiB", "30G", "lots"] {
            assert!(bytes(wrong).unwrap_err().contains("30GiB"), "{wrong}");
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
