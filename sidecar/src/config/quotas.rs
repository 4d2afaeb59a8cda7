//! `--quota NAMESPACE=SIZE`: limits of the pool's bytes for the blocks of some namespaces.

use std::fmt;
use std::str::FromStr;

use serde::Deserialize;
use shm_protocol::key::NamespaceDigest;

use super::{ConfigError, Size};

/// Quotas of one sidecar: each has two metrics, and is compared with every new namespace.
const QUOTAS_MAX: usize = 256;
/// Hex digits of a namespace, and the least number of them in a quota: among a thousand namespaces two share
/// their first eight digits once in ten thousand fleets.
const DIGITS: usize = 32;
const DIGITS_MIN: usize = 8;
const OTHERS: &str = "others";

/// A limit shared by some namespaces.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq)]
#[serde(try_from = "String")]
pub struct NamespaceQuota {
    pub whose: QuotaNamespaces,
    /// Bytes for all their blocks together.
    pub size: Size,
}

/// The namespaces of a quota.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum QuotaNamespaces {
    /// The namespaces with these first hex digits, usually one.
    Named(String),
    /// All namespaces without a quota of their own.
    Others,
}

/// Refuses overlapping quotas: a namespace can have only one.
pub(super) fn check_quotas(quotas: &[NamespaceQuota]) -> Result<(), ConfigError> {
    let range = |value: String, rule| Err(ConfigError::Range { option: "quota", value, rule });
    if quotas.len() > QUOTAS_MAX {
        return range(format!("given {} times", quotas.len()), "given at most 256 times");
    }
    for (at, quota) in quotas.iter().enumerate() {
        if let Some(other) = quotas[..at].iter().find(|other| other.whose.overlaps(&quota.whose)) {
            let value = format!("given for {} and for {}", other.whose, quota.whose);
            return range(value, "given once for a namespace: write more digits, or leave one out");
        }
    }
    Ok(())
}

/// The index of a namespace's quota in `quotas`.
pub fn find_quota(quotas: &[NamespaceQuota], namespace: NamespaceDigest) -> Option<usize> {
    let digits = namespace.to_string();
    let named = |quota: &NamespaceQuota| matches!(&quota.whose, QuotaNamespaces::Named(prefix) if digits.starts_with(prefix));
    let others = || quotas.iter().position(|quota| quota.whose == QuotaNamespaces::Others);
    quotas.iter().position(named).or_else(others)
}

// === impl QuotaNamespaces ===

impl QuotaNamespaces {
    fn overlaps(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Named(one), Self::Named(other)) => one.starts_with(other) || other.starts_with(one),
            (one, other) => one == other,
        }
    }
}

impl fmt::Display for QuotaNamespaces {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Named(digits) => formatter.write_str(digits),
            Self::Others => formatter.write_str(OTHERS),
        }
    }
}

// === impl NamespaceQuota ===

impl FromStr for NamespaceQuota {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = |why: &str| {
            format!(
                "\"{text}\" is not a quota: {why}; write NAMESPACE=SIZE, such as 7cec6c4d=10GiB or others=5GiB"
            )
        };
        let (whose, size) = text.split_once('=').ok_or_else(|| wrong("there is no \"=\" in it"))?;
        let hex = (DIGITS_MIN..=DIGITS).contains(&whose.len())
            && whose.bytes().all(|digit| digit.is_ascii_hexdigit());
        let whose = match whose {
            OTHERS => QuotaNamespaces::Others,
            _ if hex => QuotaNamespaces::Named(whose.to_ascii_lowercase()),
            _ => {
                return Err(wrong(
                    "a namespace is 32 hex digits, the first 8 or more of them, or \"others\"",
                ));
            }
        };
        Ok(Self { whose, size: size.parse()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quotas(texts: &[&str]) -> Vec<NamespaceQuota> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn a_namespace_is_named_by_its_first_digits() {
        let quotas = quotas(&["others=1GiB", "0000000A=2GiB", "0000000b00=3GiB"]);
        assert_eq!((quotas[1].whose.to_string(), quotas[1].size.as_bytes()), ("0000000a".into(), 2 << 30));
        let of = |first: &[u8]| {
            let mut bytes = [0; 16];
            bytes[..first.len()].copy_from_slice(first);
            find_quota(&quotas, NamespaceDigest(bytes))
        };
        assert_eq!(of(&[0, 0, 0, 0xa]), Some(1));
        assert_eq!((of(&[0, 0, 0, 0xb]), of(&[0, 0, 0, 0xb, 1])), (Some(2), Some(0)));
        assert_eq!(super::find_quota(&quotas[1..], NamespaceDigest([7; 16])), None);
    }

    #[test]
    fn what_is_no_quota_is_said_with_one_that_is() {
        for wrong in [
            "1GiB",
            "abcdefg=1GiB",
            "0123456=1GiB",
            "=1GiB",
            "*=1GiB",
            "0123456789abcdef0123456789abcdef0=1GiB",
        ] {
            assert!(wrong.parse::<NamespaceQuota>().unwrap_err().contains("others=5GiB"), "{wrong}");
        }
        assert!("others=5".parse::<NamespaceQuota>().unwrap_err().contains("30GiB"), "a size needs a unit");
    }

    #[test]
    fn a_namespace_has_one_quota() {
        assert!(check_quotas(&quotas(&["others=1GiB", "0123456789=2GiB", "0123456780=2GiB"])).is_ok());
        for twice in [["others=1GiB", "others=2GiB"], ["0123456789=1GiB", "01234567=2GiB"]] {
            assert!(
                check_quotas(&quotas(&twice)).unwrap_err().to_string().contains("once for a namespace"),
                "{twice:?}"
            );
        }
        let many: Vec<String> = (0..=QUOTAS_MAX).map(|number| format!("{number:08}=1GiB")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert!(check_quotas(&quotas(&many)).unwrap_err().to_string().contains("256"));
        assert!(check_quotas(&quotas(&many[1..])).is_ok());
    }
}
