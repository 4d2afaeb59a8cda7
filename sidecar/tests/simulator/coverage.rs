//! The points reached by the runs. A point reached by no run is a gap in the simulator, and fails it.

use std::collections::BTreeMap;

use shm_protocol::message::{Kind, Message};
use shm_protocol::request::SchedulerRequest;
use sidecar::core::{
    Action, CopyDirection, CoreEvent, Findings, InspectedBlocks, Inspection, JobEnd, MeshEvent, RingRequest,
    TierJob,
};
use tiers::opener::OpenedSegment;
use tiers::ssd::{self, DeviceWork};

/// Messages without a sender in the simulator.
const NEVER_SENT: [Kind; 2] = [Kind::Staged, Kind::Golden];
/// Every point except the messages, in printed order.
const POINTS: &[&str] = &[
    "event Connected",
    "event Disconnected",
    "event Message",
    "event Fences",
    "event Copied ok",
    "event Copied failed",
    "event Compared",
    "event Scanned",
    "event Verified whole",
    "event Verified changed",
    "event Drained",
    "event Opened empty",
    "event Opened used",
    "event Transferred ok",
    "event Transferred failed",
    "event Recovered",
    "event Joined",
    "event Left",
    "event Keeps",
    "event Changed",
    "event Promises",
    "event Fetched ok",
    "event Fetched failed",
    "event Asked",
    "event Asked to wait",
    "event Greeted",
    "event Leaving",
    "event Listed",
    "event Withdrawn",
    "event Released",
    "event Behind",
    "event Tick",
    "event Drain",
    "action Answer",
    "action Outcome",
    "action Saved",
    "action AssignSegment",
    "action DisownSlot",
    "action FreeSlot",
    "action FillSlot",
    "action CommitSlot",
    "action Copy save",
    "action Copy load",
    "action Compare",
    "action Scan",
    "action Verify",
    "action Transfer",
    "action Transfer read",
    "action Fetch",
    "action Fetch of promised blocks",
    "action CancelFetch",
    "action Grant",
    "action Publish",
    "action Promise",
    "action Resync",
    "action AskBlocks",
    "action Bind",
    "action Warn",
    "action Close",
    "fault engine crash",
    "fault rank dies first",
    "fault engine crash, copy running",
    "fault sidecar crash",
    "fault sidecar crash, copy running",
    "fault sidecar restart while serving",
    "fault torn header, dead",
    "fault torn header, resumed",
    "fault freeze sidecar",
    "fault freeze copiers",
    "fault freeze scheduler",
    "fault freeze thread",
    "fault freeze worker",
    "fault copy failed",
    "fault lost wake-up",
    "fault session cut",
    "fault full ring",
    "fault violation",
    "fault worker joins late",
    "fault pool file changed",
    "engine offered a state",
    "engine loaded a set",
    "engine load of a set failed",
    "engine freed a block before a window",
    "engine hit",
    "engine miss",
    "engine query answered later",
    "engine query timed out",
    "engine query without room",
    "engine query not asked",
    "engine query not ready",
    "engine query barred",
    "engine query waits for a producer",
    "engine awaits another",
    "engine hands over",
    "engine early answer",
    "engine load in parts",
    "engine streamed answer",
    "engine load of a stream",
    "engine load refused",
    "engine lease reused",
    "engine lease renewed before the load",
    "engine load without lease",
    "engine sync load",
    "engine async load",
    "engine load of a part",
    "engine load by sidecar",
    "engine early load",
    "engine load by engine",
    "engine rescue after a failed copy",
    "engine rescue after the deadline",
    "engine rescue after a hang-up",
    "engine rescue from an earlier pool",
    "engine waited for a copy to end",
    "engine slot refused before the copy",
    "engine slot refused after the copy",
    "engine load failed, recomputed",
    "engine loaded without room, told later",
    "engine save",
    "engine save without room",
    "engine step skipped",
    "engine step raised",
    "engine step refused",
    "engine saves voided",
    "engine saves voided by a step",
    "engine hit of its own cache",
    "engine listed a block that no step fills",
    "engine named blocks to be reused next",
    "engine asks again after a failed load",
    "engine reset beside blocks in use",
    "policy doubts the engine's own cache",
    "policy gives a held block back",
    "policy has a request step aside",
    "policy holds a block",
    "policy is told of failed loads",
    "policy is told of no output",
    "policy learns of a contradiction",
    "policy lingers",
    "policy names open loads",
    "policy names passed steps",
    "policy puts a load off",
    "policy sees steps passed over",
    "engine close without room",
    "engine preempted",
    "engine aborted",
    "engine aborted while loading",
    "engine reset",
    "engine reset without room",
    "engine weights changed",
    "engine weights came back",
    "engine load of another namespace",
    "engine fence withheld",
    "sidecar gate closed",
    "sidecar evicted a replaced state",
    "sidecar granted a kept ask",
    "sidecar kept an ask",
    "sidecar prefetched a block after a start",
    "sidecar prefetched a block of a leaving peer",
    "sidecar listed a block",
    "sidecar leaves",
    "sidecar backlog",
    "sidecar slept",
    "sidecar adopted a block",
    "sidecar dropped a torn block",
    "sidecar noted a checksum",
    "sidecar evicted for another size",
    "save committed",
    "save present",
    "save cancelled",
    "save dropped",
    "save unaccepted",
    "slow disk read",
    "slow disk read failed",
    "check agreed",
    "check differed",
    "verdicts engine restarts",
    "verdicts faulty step",
    "verdicts wrong block loaded",
    "verdicts left block loaded",
    "verdicts wrong engine barred",
    "verdicts right engine barred",
    "verdicts namespace began again",
];

/// Every point; the name of a message is a point too.
pub(crate) fn points() -> impl Iterator<Item = &'static str> {
    let messages = Kind::ALL.into_iter().filter(|kind| !NEVER_SENT.contains(kind)).map(Kind::name);
    POINTS.iter().copied().chain(messages)
}

/// The number of times each point was reached.
#[derive(Clone, Debug, Default)]
pub(crate) struct Coverage(BTreeMap<&'static str, u64>);

// === impl Coverage ===

impl Coverage {
    pub(crate) fn hit(&mut self, point: &'static str) {
        self.add(point, 1);
    }

    pub(crate) fn add(&mut self, point: &'static str, count: u64) {
        debug_assert!(points().any(|listed| listed == point), "{point} is not listed");
        if count > 0 {
            *self.0.entry(point).or_default() += count;
        }
    }

    pub(crate) fn merge(&mut self, other: &Self) {
        other.0.iter().for_each(|(point, count)| self.add(point, *count));
    }

    pub(crate) fn count(&self, point: &str) -> u64 {
        self.0.get(point).copied().unwrap_or(0)
    }

    /// Points never reached.
    pub(crate) fn missing(&self) -> Vec<&'static str> {
        points().filter(|point| self.count(point) == 0).collect()
    }
}

/// The name of an event.
pub(crate) fn event(event: &CoreEvent) -> &'static str {
    match event {
        CoreEvent::Connected { .. } => "event Connected",
        CoreEvent::Disconnected { .. } => "event Disconnected",
        CoreEvent::Message { .. } => "event Message",
        CoreEvent::Fences { .. } => "event Fences",
        CoreEvent::Copied { ok: true, .. } => "event Copied ok",
        CoreEvent::Copied { ok: false, .. } => "event Copied failed",
        CoreEvent::Drained { .. } => "event Drained",
        CoreEvent::Inspected { findings: Findings::Compared(_), .. } => "event Compared",
        CoreEvent::Inspected { findings: Findings::Searched(_), .. } => "event Scanned",
        CoreEvent::Verified { whole: true, .. } => "event Verified whole",
        CoreEvent::Verified { .. } => "event Verified changed",
        CoreEvent::Opened(OpenedSegment::Empty { .. }) => "event Opened empty",
        CoreEvent::Opened(OpenedSegment::Used { .. }) => "event Opened used",
        CoreEvent::Behind { .. } => "event Behind",
        CoreEvent::Tick => "event Tick",
        CoreEvent::Drain => "event Drain",
        CoreEvent::Transferred { ends, .. } => transferred(ends),
        CoreEvent::Mesh(MeshEvent::Joined(_)) => "event Joined",
        CoreEvent::Mesh(MeshEvent::Left(_)) => "event Left",
        CoreEvent::Mesh(MeshEvent::Keeps { .. }) => "event Keeps",
        CoreEvent::Mesh(MeshEvent::Changed { .. }) => "event Changed",
        CoreEvent::Mesh(MeshEvent::Promises { .. }) => "event Promises",
        CoreEvent::Mesh(MeshEvent::Greeted { .. }) => "event Greeted",
        CoreEvent::Mesh(MeshEvent::Leaving(_)) => "event Leaving",
        CoreEvent::Mesh(MeshEvent::Listed { .. }) => "event Listed",
        CoreEvent::Mesh(MeshEvent::Asked { standing: Some(_), .. }) => "event Asked to wait",
        CoreEvent::Mesh(MeshEvent::Asked { .. }) => "event Asked",
        CoreEvent::Mesh(MeshEvent::Withdrawn { .. }) => "event Withdrawn",
        CoreEvent::Mesh(MeshEvent::Released { .. }) => "event Released",
    }
}

fn transferred(ends: &[JobEnd]) -> &'static str {
    match ends {
        [JobEnd::Disk(done)] if done.result.is_ok() => "event Transferred ok",
        [JobEnd::Disk(_)] => "event Transferred failed",
        [JobEnd::Recovered(_)] => "event Recovered",
        ends if ends.iter().all(|end| matches!(end, JobEnd::Peer(done) if done.result.is_ok())) => {
            "event Fetched ok"
        }
        _ => "event Fetched failed",
    }
}

/// The name of an action.
pub(crate) fn action(action: &Action) -> &'static str {
    match action {
        Action::Answer { .. } => "action Answer",
        Action::Outcome { .. } => "action Outcome",
        Action::Saved { .. } => "action Saved",
        Action::AssignSegment { .. } => "action AssignSegment",
        Action::DisownSlot { .. } => "action DisownSlot",
        Action::FreeSlot { .. } => "action FreeSlot",
        Action::FillSlot { .. } => "action FillSlot",
        Action::CommitSlot { .. } => "action CommitSlot",
        Action::Copy { direction: CopyDirection::Save, .. } => "action Copy save",
        Action::Copy { direction: CopyDirection::Load, .. } => "action Copy load",
        Action::Inspect(Inspection { blocks: InspectedBlocks::Pairs(_), .. }) => "action Compare",
        Action::Inspect(Inspection { blocks: InspectedBlocks::Alone(_), .. }) => "action Scan",
        Action::Verify { .. } => "action Verify",
        Action::Transfer { job, .. } => match job {
            TierJob::Disk(ssd::DeviceJob { work: DeviceWork::Read { .. }, .. }) => "action Transfer read",
            TierJob::Fetch(fetch) if fetch.standing.is_some() => "action Fetch of promised blocks",
            TierJob::Fetch(_) => "action Fetch",
            TierJob::CancelFetch { .. } => "action CancelFetch",
            _ => "action Transfer",
        },
        Action::Grant { .. } => "action Grant",
        Action::Publish { .. } => "action Publish",
        Action::Promise(_) => "action Promise",
        Action::Resync { .. } => "action Resync",
        Action::AskBlocks { .. } => "action AskBlocks",
        Action::Bind { .. } => "action Bind",
        Action::Warn(_) => "action Warn",
        Action::Close { .. } => "action Close",
    }
}

/// The name of a message.
pub(crate) fn message(request: &RingRequest) -> &'static str {
    let message = match request {
        RingRequest::Scheduler { request, .. } => Message::from(*request),
        RingRequest::Advice(part) => Message::from(SchedulerRequest::Advise(part.advise)),
        RingRequest::Worker(request) => Message::from(*request),
    };
    message.kind.name()
}
