//! What is logged, and how: to standard error, down to a level that may change while the sidecar runs.

use std::sync::{Arc, Mutex, PoisonError};

use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry, fmt, reload};

use crate::config::{Level, LogFormat};

/// The least severe messages that are logged, as all who may change it share it. Without [`start`] there is none to change.
#[derive(Clone, Debug, Default)]
pub struct LogLevel(Option<Arc<Mutex<State>>>);

#[derive(Debug)]
struct State {
    level: Level,
    filter: reload::Handle<LevelFilter, Registry>,
}

/// Logs from now on; once in the life of a process.
pub fn start(level: Level, format: LogFormat) -> LogLevel {
    let (filter, handle) = reload::Layer::new(filter_of(level));
    let lines = fmt::layer().with_writer(std::io::stderr).with_target(false);
    let lines = match format {
        LogFormat::Text => lines.boxed(),
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
    };
    tracing_subscriber::registry().with(filter).with(lines).init();
    LogLevel(Some(Arc::new(Mutex::new(State { level, filter: handle }))))
}

fn filter_of(level: Level) -> LevelFilter {
    match level {
        Level::Error => LevelFilter::ERROR,
        Level::Warn => LevelFilter::WARN,
        Level::Info => LevelFilter::INFO,
        Level::Debug => LevelFilter::DEBUG,
    }
}

// === impl LogLevel ===

impl LogLevel {
    /// The level as it is now; `None` where somebody else logs.
    pub fn get(&self) -> Option<Level> {
        let state = self.0.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner);
        Some(state.level)
    }

    /// Changes the level; the one before, or `None` where somebody else logs.
    pub fn set(&self, level: Level) -> Option<Level> {
        let mut state = self.0.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner);
        state.filter.reload(filter_of(level)).ok()?;
        Some(std::mem::replace(&mut state.level, level))
    }
}
