//! The kernel's clock, epoll and eventfds.

pub mod clock;
pub mod poller;
pub mod wake;
