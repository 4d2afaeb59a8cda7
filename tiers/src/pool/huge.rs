//! The machine's free huge pages.

use std::fs;

use crate::Error;

/// Bytes of the huge pages of anonymous pools: every x86 and most other machines have them, and a pool is a
/// whole number of them.
pub(super) const PAGE_BYTES: u64 = 2 << 20;

/// The machine's huge pages of one size.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
struct Pages {
    bytes: u64,
    /// Reserved by the administrator, used or not.
    total: u64,
    /// Not used and not reserved by a mapping.
    available: u64,
}

/// Fails unless enough huge pages of `page_bytes` are free for a pool, apart from `held` bytes its file
/// already has.
pub(super) fn check(bytes: u64, page_bytes: u64, held: u64) -> Result<(), Error> {
    if !bytes.is_multiple_of(page_bytes) {
        return Err(Error::HugePageBytes { bytes, page_bytes });
    }
    Pages::of(page_bytes).check(bytes, held)
}

// === impl Pages ===

impl Pages {
    fn of(bytes: u64) -> Self {
        let folder = format!("/sys/kernel/mm/hugepages/hugepages-{}kB", bytes / 1024);
        let figure = |name: &str| -> u64 {
            let text = fs::read_to_string(format!("{folder}/{name}")).unwrap_or_default();
            text.trim().parse().unwrap_or(0)
        };
        // A mapping reserves pages before it uses them. Pages the kernel may add by itself do not count,
        // since it may fail to find them.
        let available = figure("free_hugepages").saturating_sub(figure("resv_hugepages"));
        Self { bytes, total: figure("nr_hugepages"), available }
    }

    fn check(self, bytes: u64, held: u64) -> Result<(), Error> {
        let needed = bytes.saturating_sub(held).div_ceil(self.bytes);
        if needed <= self.available {
            return Ok(());
        }
        Err(Error::NoHugePages {
            bytes,
            needed,
            page_kib: self.bytes / 1024,
            available: self.available,
            total: self.total + needed - self.available,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_few_pages_are_refused_with_the_number_to_reserve() {
        let pages = Pages { bytes: PAGE_BYTES, total: 10, available: 4 };
        assert!(pages.check(8 << 20, 0).is_ok() && pages.check(10 << 20, 2 << 20).is_ok());
        let refused = pages.check(10 << 20, 0).expect_err("one is missing").to_string();
        for remedy in [
            "5 huge pages of 2048 KiB",
            "4 are free",
            "sysctl vm.nr_hugepages=11",
            "hugepages-2Mi: 10Mi",
            "lower --dram",
        ] {
            assert!(refused.contains(remedy), "{remedy} in {refused}");
        }
        assert!(
            check(3 << 20, PAGE_BYTES, 0).expect_err("no whole pages").to_string().contains("pagesize=2M")
        );
        assert_eq!(Pages::of(3 << 10).available, 0, "no machine has such pages");
    }
}
