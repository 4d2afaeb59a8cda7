//! The data thread between two turns: it spins briefly, then sleeps without missing an event.

use std::num::NonZeroU64;
use std::time::Duration;

use super::opening::OPENING_POLL;
use super::{Runtime, TICK, turn};
use crate::pages::heartbeat;
use crate::system::poller::PollSource;

/// Time to spin after the last work. An engine's next message of a step comes within microseconds, but waking
/// a sleeping sidecar held the engine's thread for 57 us on a virtual machine (measured). A shorter spin
/// would end before the engine continues, and every message would need a wake-up
/// (docs/decisions/0004-sidecar-and-engine-spin-before-they-sleep.md).
const SPIN: Duration = Duration::from_micros(200);
/// Interval of polls of the sockets under constant work.
const IO: Duration = Duration::from_millis(1);
/// Intervals of reads of the fence words while a copy waits for one: `(until, interval)` since the wait
/// began. A step of a GPU engine ends within a second; a word that stands still for longer is of an engine on
/// a slow CPU, or of a frozen one.
const FENCE_POLLS: [(Duration, Duration); 3] = [
    (Duration::from_millis(1), Duration::from_micros(20)),
    (Duration::from_millis(100), Duration::from_micros(100)),
    (Duration::MAX, Duration::from_millis(1)),
];
/// Shorter interval while a save for another engine waits, whose request waits too, and the time limit of
/// this interval.
const HANDOVER_POLL: Duration = Duration::from_micros(50);
const HANDOVER_POLLS: Duration = Duration::from_secs(2);
/// Interval of checks for the end of the grace period and of the last copy.
const DRAIN_POLL: Duration = Duration::from_millis(5);
/// The default slack of 50 us would delay every fence poll by as much.
const TIMER_SLACK_NS: u64 = 1;

/// Lowers this thread's timer slack, so its sleeps end in time.
pub(super) fn sharpen_timers() {
    if let Err(error) = rustix::thread::set_current_timer_slack(NonZeroU64::new(TIMER_SLACK_NS)) {
        tracing::warn!(%error, "the timer slack cannot be lowered; saves start up to 50 us late");
    }
}

// === impl Runtime: rest ===

impl Runtime {
    pub(super) fn rest_until_work(&mut self, worked: bool) {
        if worked {
            self.last_work = self.now;
        }
        // An event may have been the end of a copy. Its wake-up does not come twice, so the next turn comes
        // before any sleep.
        let served = self.now >= self.last_io + IO && self.serve_io(Some(Duration::ZERO));
        if served || worked || self.touched || !self.refused.is_empty() {
            return;
        }
        if self.now < self.last_work + SPIN {
            // No yield: beside a busy process, a yielded core came back after 4 ms.
            std::hint::spin_loop();
            return;
        }
        self.sleep();
    }

    /// Tells the engines that this thread sleeps, checks the rings once more, and sleeps if they are empty.
    fn sleep(&mut self) {
        let nap = self.nap();
        if turn::fall_asleep(self) {
            self.serve_io(nap);
        }
        turn::wake_up(self);
    }

    /// The longest sleep allowed now.
    fn nap(&mut self) -> Option<Duration> {
        let waits = self.sessions.keys().any(|&session| self.core.waits_on_fences(session));
        let since = match waits {
            true => Some(*self.fences_since.get_or_insert(self.now)),
            false => None,
        };
        self.fences_since = since;
        let fences = since.map(|since| {
            let waited = self.now.saturating_sub(since);
            let poll = FENCE_POLLS.iter().find(|(until, _)| waited < *until).expect("the last has no end").1;
            let hands_over = || self.sessions.keys().any(|&session| self.core.hands_over(session));
            if poll > HANDOVER_POLL && waited < HANDOVER_POLLS && hands_over() { HANDOVER_POLL } else { poll }
        });
        let lives = !self.sessions.is_empty() || self.peers.is_some() || self.core.waits_for_tiers();
        let tick = if lives { TICK } else { heartbeat::IDLE };
        let greeting = self.handshakes.next_deadline().map(|at| at.saturating_sub(self.now));
        let drain = self.end_by.map(|_| DRAIN_POLL);
        let opening = self.opener.is_some().then_some(OPENING_POLL);
        let look = self.core.next_look_ms().map(|at| Duration::from_millis(at).saturating_sub(self.now));
        [fences, Some(tick), look, greeting, drain, opening].into_iter().flatten().min()
    }

    /// Waits at most `nap` for descriptors and serves the ready ones. Returns true if there were any.
    fn serve_io(&mut self, nap: Option<Duration>) -> bool {
        let mut events = std::mem::take(&mut self.events);
        self.poller.wait_events(nap, &mut events).expect("an epoll of this process");
        self.now = self.clock.now();
        self.last_io = self.now;
        let served = !events.is_empty();
        for source in events.drain(..) {
            match source {
                PollSource::Listener => self.handshakes.accept_waiting(self.now, &self.poller),
                PollSource::Greeting(id) => {
                    if let Some(caller) = self.handshakes.read_hello(id, &self.poller) {
                        self.admit_client(caller);
                    }
                }
                PollSource::Socket(id) => self.read_socket(id),
                PollSource::Process(id) => self.end_with_process(id),
                // The thread is awake, and the next turn reads the rings and channels.
                PollSource::Doorbell(_)
                | PollSource::Copies
                | PollSource::Disks
                | PollSource::Checksums
                | PollSource::Mesh
                | PollSource::Inbox => {}
            }
        }
        self.events = events;
        self.handshakes.expire(self.now, &self.poller);
        served
    }
}
