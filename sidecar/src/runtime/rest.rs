//! What the data thread does between two turns: spin briefly, then sleep without missing anything.

use std::num::NonZeroU64;
use std::time::Duration;

use super::opening::OPENING_POLL;
use super::{Runtime, TICK, turn};
use crate::pages::heartbeat;
use crate::system::poller::Source;

/// How long to spin after the last work. A peer's next message of the same step comes within microseconds, but ringing a
/// sleeping sidecar was measured to hold the ringing thread for 57 us on a virtual machine: a spin that is shorter ends
/// before the peer goes on, and every message rings again (docs/decisions/0004-sidecar-and-engine-spin-before-they-sleep.md).
const SPIN: Duration = Duration::from_micros(200);
/// While there is always work, sockets are looked at this often.
const IO: Duration = Duration::from_millis(1);
/// How often fence words are read while a copy waits for one: `(until, interval)` since the wait began. A step of a GPU
/// engine ends within the second; a word that has not moved for longer is a slow CPU's, or a frozen engine's.
const FENCE_POLLS: [(Duration, Duration); 3] = [
    (Duration::from_millis(1), Duration::from_micros(20)),
    (Duration::from_millis(100), Duration::from_micros(100)),
    (Duration::MAX, Duration::from_millis(1)),
];
/// The same while a save for another engine waits: that engine's request waits for the step, too. So long at most.
const HANDOVER_POLL: Duration = Duration::from_micros(50);
const HANDOVER_POLLS: Duration = Duration::from_secs(2);
/// How often the end of the grace period and of the last copy is looked for.
const DRAIN_POLL: Duration = Duration::from_millis(5);
/// The default of 50 us would make every fence poll that much later.
const TIMER_SLACK_NS: u64 = 1;

/// Makes this thread's sleeps end in time.
pub(super) fn sharpen_timers() {
    if let Err(error) = rustix::thread::set_current_timer_slack(NonZeroU64::new(TIMER_SLACK_NS)) {
        tracing::warn!(%error, "the timer slack cannot be lowered; saves start up to 50 us late");
    }
}

// === impl Runtime: rest ===

impl Runtime {
    pub(super) fn rest(&mut self, worked: bool) {
        if worked {
            self.last_work = self.now;
        }
        // An event may have been the end of a copy: it is not announced twice, so no sleep before the next turn.
        let served = self.now >= self.last_io + IO && self.serve_io(Some(Duration::ZERO));
        if served || worked || self.touched || !self.refused.is_empty() {
            return;
        }
        if self.now < self.last_work + SPIN {
            // Not yielding: beside a busy process, a yielded core came back 4 ms later.
            std::hint::spin_loop();
            return;
        }
        self.sleep();
    }

    /// Says that it sleeps, looks once more, and only then does.
    fn sleep(&mut self) {
        let nap = self.nap();
        if turn::fall_asleep(self) {
            self.serve_io(nap);
        }
        turn::wake_up(self);
    }

    /// How long it may sleep.
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
        let greeting = self.greeter.next_deadline().map(|at| at.saturating_sub(self.now));
        let drain = self.end_by.map(|_| DRAIN_POLL);
        let opening = self.opener.is_some().then_some(OPENING_POLL);
        let look = self.core.next_look_ms().map(|at| Duration::from_millis(at).saturating_sub(self.now));
        [fences, Some(tick), look, greeting, drain, opening].into_iter().flatten().min()
    }

    /// Waits for descriptors for at most `nap` and serves those that became ready; whether any did.
    fn serve_io(&mut self, nap: Option<Duration>) -> bool {
        let mut events = std::mem::take(&mut self.events);
        self.poller.wait(nap, &mut events).expect("an epoll of this process");
        self.now = self.clock.now();
        self.last_io = self.now;
        let served = !events.is_empty();
        for source in events.drain(..) {
            match source {
                Source::Listener => self.greeter.accept(self.now, &self.poller),
                Source::Greeting(id) => {
                    if let Some(caller) = self.greeter.read(id, &self.poller) {
                        self.admit(caller);
                    }
                }
                Source::Socket(id) => self.read_socket(id),
                Source::Process(id) => self.end_with_process(id),
                // Being awake is all that is wanted; the next turn looks at the words.
                Source::Doorbell(_)
                | Source::Copies
                | Source::Disks
                | Source::Checksums
                | Source::Mesh
                | Source::Inbox => {}
            }
        }
        self.events = events;
        self.greeter.expire(self.now, &self.poller);
        served
    }
}
