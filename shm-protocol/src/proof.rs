//! Protections that `make prove` removes, one at a time, to see a test fail. No release is built with any of them: the
//! wheel is searched for the symbol `PILLION_PROOF` and its text.

/// CANCEL is never posted: a block reused while it is saved is kept under the wrong key.
pub const WITHOUT_CANCEL: bool = cfg!(feature = "without-cancel");
/// The sidecar ignores the gate: it writes into blocks that the engine has taken back.
pub const WITHOUT_GATE: bool = cfg!(feature = "without-gate");
/// A save is committed as soon as its copy ended, whatever lies unread in the ring.
pub const WITHOUT_COMMIT_RULE: bool = cfg!(feature = "without-commit-rule");
/// A load that the sidecar did not finish is called finished.
pub const WITHOUT_RESCUE: bool = cfg!(feature = "without-rescue");

/// In every binary that lacks a protection, and in no other.
#[cfg(any(
    feature = "without-cancel",
    feature = "without-gate",
    feature = "without-commit-rule",
    feature = "without-rescue"
))]
#[used]
pub static PILLION_PROOF: [u8; 42] = *b"pillion-proof: built without a protection\0";
