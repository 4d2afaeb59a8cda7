//! Which CPUs are near a GPU: memory that their threads touch first lies there too, where the machine has several nodes.

use std::path::Path;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Where the kernel describes PCI devices.
const PCI_DEVICES: &str = "/sys/bus/pci/devices";

/// CPUs of one NUMA node, as the kernel lists those near a device.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Near(Vec<usize>);

// === impl Near ===

impl Near {
    /// CPUs near the device at a PCI address such as `0000:1b:00.0`; `None` where the kernel does not say.
    pub fn device(address: &str) -> Option<Self> {
        Self::read(&Path::new(PCI_DEVICES).join(address).join("local_cpulist"))
    }

    fn read(list: &Path) -> Option<Self> {
        Self::parse(std::fs::read_to_string(list).ok()?.trim())
    }

    /// The kernel's form: `0-3,8,10-11`.
    fn parse(list: &str) -> Option<Self> {
        let mut cpus = Vec::new();
        for part in list.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
            (last < CpuSet::MAX_CPU).then_some(())?;
            cpus.extend(first..=last);
        }
        Some(Self(cpus))
    }

    /// Keeps the calling thread on these CPUs, as far as its container lets it. A thread that may use none of them stays.
    pub fn bind_thread(&self) {
        let Ok(allowed) = sched_getaffinity(None) else { return };
        let mut near = CpuSet::new();
        self.0.iter().filter(|cpu| allowed.is_set(**cpu)).for_each(|cpu| near.set(*cpu));
        if near.count() > 0 {
            // Where this is refused, memory merely lies further away.
            let _ = sched_setaffinity(None, &near);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_the_kernel() {
        assert_eq!(Near::parse("0-3,8,10-11"), Some(Near(vec![0, 1, 2, 3, 8, 10, 11])));
        assert_eq!(Near::parse("5"), Some(Near(vec![5])));
        for odd in ["", "a", "1-", "-2", "0-1000000", "1,,2"] {
            assert_eq!(Near::parse(odd), None, "{odd}");
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
            "none of them: it stays where it is"
        );
    }
}
