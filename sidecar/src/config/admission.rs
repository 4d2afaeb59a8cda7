//! `--dram-admission`: which blocks a full pool takes in.

use std::str::FromStr;

use serde::Deserialize;

/// Which blocks a full pool takes in.
#[derive(Copy, Clone, Debug, Default, Deserialize, Eq, PartialEq)]
#[serde(try_from = "String")]
pub enum DramAdmission {
    /// Every one.
    #[default]
    All,
    /// Those that are asked for more often than what they would replace.
    TinyLfu,
}

// === impl DramAdmission ===

impl FromStr for DramAdmission {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "all" => Ok(Self::All),
            "tinylfu" => Ok(Self::TinyLfu),
            _ => Err(format!("\"{text}\" is no admission filter; the values are all, tinylfu")),
        }
    }
}
