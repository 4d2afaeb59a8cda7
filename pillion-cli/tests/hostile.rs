//! Broken and hostile engines against a `pillion` process. Each is closed with a reason; a good engine beside
//! it is still served with every byte right, the process lives, and nothing of the hostile engine is left.

#[path = "hostile/admission.rs"]
mod admission;
mod client;
#[path = "hostile/control.rs"]
mod control;
#[path = "hostile/death.rs"]
mod death;
#[path = "hostile/floods.rs"]
mod floods;
#[path = "hostile/hoards.rs"]
mod hoards;
#[path = "hostile/members.rs"]
mod members;
#[path = "hostile/memory.rs"]
mod memory;
#[path = "hostile/messages.rs"]
mod messages;
#[path = "hostile/pool_file.rs"]
mod pool_file;
#[path = "hostile/scene.rs"]
mod scene;
