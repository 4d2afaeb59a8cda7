//! Pages and metrics for people and monitoring, and the connections of HTTP servers.

pub mod admin;
pub mod connections;
pub mod heartbeat;
pub mod metrics;
pub mod overview;
pub mod progress;
pub mod quotas;
