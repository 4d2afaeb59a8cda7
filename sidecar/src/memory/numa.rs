//! CPUs near a GPU. A thread bound to them places the memory it touches first on the GPU's NUMA node.

use std::path::Path;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The kernel's folder of PCI devices.
const PCI_DEVICES: &str = "/sys/bus/pci/devices";

/// The CPUs of one NUMA node, as listed by the kernel for a device.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Near(Vec<usize>);

// === impl Near ===

impl Near {
    /// The CPUs near the device at a PCI address such as `0000:1b:00.0`; `None` if the kernel does not list
    /// them.
    pub fn device(address: &str) -> Option<Self> {
        Self::read_list(&Path::new(PCI_DEVICES).join(address).join("local_cpulist"))
    }

    fn read_list(list: &Path) -> Option<Self> {
        Self::parse_list(std::fs::read_to_string(list).ok()?.trim())
    }

    /// Parses the kernel's form `0-3,8,10-11`.
    fn parse_list(list: &str) -> Option<Self> {
        let mut cpus = Vec::new();
        for part in list.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
            (last < CpuSet::MAX_CPU).then_some(())?;
            cpus.extend(first..=last);
        }
        Some(Self(cpus))
    }

    /// Binds the calling thread to these CPUs, as far as its container allows. A thread allowed none of them
    /// is not bound.
    pub fn bind_thread(&self) {
        let Ok(allowed) = sched_getaffinity(None) else { return };
        let mut near = CpuSet::new();
        self.0.iter().filter(|cpu| allowed.is_set(**cpu)).for_each(|cpu| near.set(*cpu));
        if near.count() > 0 {
            // If the kernel refuses, memory only lies further away.
            let _ = sched_setaffinity(None, &near);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_the_kernel() {
        assert_eq!(Near::parse_list("0-3,8,10-11"), Some(Near(vec![0, 1, 2, 3, 8, 10, 11])));
        assert_eq!(Near::parse_list("5"), Some(Near(vec![5])));
        for odd in ["", "a", "1-", "-2", "0-1000000", "1,,2"] {
            assert_eq!(Near::parse_list(odd), None, "{odd}");
        }
        assert_eq!(Near::device("ffff:ff:ff.f"), None);
    }

    #[test]
    fn a_thread_is_bound_to_what_it_may_use() {
        let allowed = sched_getaffinity(None).unwrap();
        let one = (0..CpuSet::MAX_CPU).find(|cpu| allowed.is_set(*cpu)).unwrap();
        let bound = |near: Near| {
            let thread = std::thread::spawn(move || {
                near.bind_thread();
                sched_getaffinity(None).unwrap().count()
            });
            thread.join().unwrap()
        };
        assert_eq!(bound(Near(vec![one, CpuSet::MAX_CPU - 1])), 1);
        assert_eq!(
            bound(Near(vec![CpuSet::MAX_CPU - 1])),
            allowed.count(),
            "the thread may use none of them and is not bound"
        );
    }
}
