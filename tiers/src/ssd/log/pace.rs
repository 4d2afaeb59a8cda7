//! How much may wait to be read from a device: what it reads while a query waits. What is asked for beyond would come when nobody
//! waits for it any more, and would delay what others ask for.

use shm_protocol::layout::QUERY_WAIT_MS_MAX;

/// Bytes of reads with which a device has enough to do, so that what it ends then is its rate.
const BUSY_BYTES: u64 = 32 << 20;
/// Bytes that may always wait; more than [`BUSY_BYTES`], so that a rate that was low once is taken again.
const BYTES_MIN: u64 = 2 * BUSY_BYTES;
/// Milliseconds over which a rate is taken.
const WINDOW_MS: u64 = 250;

/// The reads of one device.
#[derive(Clone, Debug, Default)]
pub(super) struct Pace {
    /// Bytes of reads that have not ended.
    waiting: u64,
    /// Since when more than [`BUSY_BYTES`] wait, and bytes that were read since.
    busy: Option<(u64, u64)>,
    /// Bytes that it reads while a query waits; none before it was busy for a window.
    reach: Option<u64>,
}

// === impl Pace ===

impl Pace {
    /// Whether a read would end in time.
    pub(super) fn takes(&self, bytes: u64) -> bool {
        self.reach.is_none_or(|reach| self.waiting + bytes <= reach.max(BYTES_MIN))
    }

    pub(super) fn began(&mut self, bytes: u64, now_ms: u64) {
        self.waiting += bytes;
        if self.waiting > BUSY_BYTES {
            self.busy.get_or_insert((now_ms, 0));
        }
    }

    /// A read ended, with `bytes` of which `read` were had.
    pub(super) fn ended(&mut self, bytes: u64, read: u64, now_ms: u64) {
        self.waiting -= bytes;
        let Some((since_ms, sum)) = &mut self.busy else { return };
        *sum += read;
        let took_ms = now_ms.saturating_sub(*since_ms);
        if took_ms >= WINDOW_MS {
            let reach = *sum * u64::from(QUERY_WAIT_MS_MAX) / took_ms;
            self.reach = Some(self.reach.map_or(reach, |before| before.midpoint(reach)));
            self.busy = Some((now_ms, 0));
        }
        if self.waiting <= BUSY_BYTES {
            self.busy = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Asks for all that is taken, in MiB, up to `most`; how many were.
    fn ask(pace: &mut Pace, most: u64, now_ms: u64) -> u64 {
        let taken = (0..most).take_while(|_| {
            pace.takes(MIB) && {
                pace.began(MIB, now_ms);
                true
            }
        });
        taken.count() as u64
    }

    /// The device reads one MiB each `step_ms`, until `until_ms`.
    fn read(pace: &mut Pace, now_ms: &mut u64, until_ms: u64, step_ms: u64) {
        while *now_ms < until_ms {
            *now_ms += step_ms;
            pace.ended(MIB, MIB, *now_ms);
        }
    }

    #[test]
    fn no_more_waits_than_is_read_while_a_query_waits() {
        let (mut pace, mut now_ms) = (Pace::default(), 0);
        assert_eq!(ask(&mut pace, 10_000, 0), 10_000, "nothing is known of it");
        read(&mut pace, &mut now_ms, 9_000, 1);
        assert_eq!(
            ask(&mut pace, 10_000, now_ms),
            1_000,
            "1,000 of them still wait, and 2,000 MiB are read in 2 s"
        );
        read(&mut pace, &mut now_ms, 10_500, 1);
        assert_eq!(ask(&mut pace, 10_000, now_ms), 1_500);
    }

    #[test]
    fn a_rate_follows_the_device_and_idle_times_say_nothing() {
        let (mut pace, mut now_ms) = (Pace::default(), 0);
        ask(&mut pace, 1_000, 0);
        read(&mut pace, &mut now_ms, 1_000, 1);
        assert_eq!(pace.waiting, 0);
        now_ms += 60_000;
        assert_eq!(ask(&mut pace, 10_000, now_ms), 2_000);
        // It reads an eighth of that for some time: the queue shrinks to the least.
        let slow = now_ms + 15_000;
        read(&mut pace, &mut now_ms, slow, 8);
        assert!(ask(&mut pace, 10_000, now_ms) < 260 && pace.waiting >= 64);
        // And as before: with what always may wait the rate is taken again.
        for _ in 0..100 {
            let soon = now_ms + 20;
            read(&mut pace, &mut now_ms, soon, 1);
            ask(&mut pace, 10_000, now_ms);
        }
        assert!(pace.waiting > 1_500, "{}", pace.waiting);
    }

    #[test]
    fn a_device_that_gave_nothing_is_asked_for_a_little() {
        let (mut pace, mut now_ms) = (Pace::default(), 0);
        ask(&mut pace, 1_000, 0);
        for _ in 0..1_000 {
            now_ms += 5;
            pace.ended(MIB, 0, now_ms);
        }
        assert_eq!(ask(&mut pace, 1_000, now_ms), 64);
    }
}
