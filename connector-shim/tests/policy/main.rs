//! The policy over a real session, as an engine calls it: its requests in the ring, and its answers.

mod acceptance;
mod adapters;
mod beside_others;
mod checking;
mod device;
mod ends;
mod events;
mod handover;
mod harness;
mod held;
mod hints;
mod pacing;
mod scheduler_role;
mod sets;
mod sidecar;
mod states;
mod tails;
mod weights;
