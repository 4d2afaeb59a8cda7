//! The log's lines: to standard error, at a level that may change while the sidecar runs, or to standard
//! output.

use std::sync::{Arc, Mutex, PoisonError};

use tracing::Subscriber;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry, fmt, reload};

use crate::config::{LogFormat, Severity};

/// The log's level; all clones share it. It is empty until [`start_logging`] is called, and cannot be changed then.
#[derive(Clone, Debug, Default)]
pub struct LogLevel(Option<Arc<Mutex<LogState>>>);

#[derive(Debug)]
struct LogState {
    level: Severity,
    filter: reload::Handle<LevelFilter, Registry>,
}

/// Starts the log on standard error. A process calls it once.
pub fn start_logging(level: Severity, format: LogFormat) -> LogLevel {
    let (filter, handle) = reload::Layer::new(filter_of(level));
    tracing_subscriber::registry().with(filter).with(lines(format, std::io::stderr)).init();
    LogLevel(Some(Arc::new(Mutex::new(LogState { level, filter: handle }))))
}

/// Runs `work` and writes its messages of level info and above to standard output, at any level of the log.
pub fn to_stdout(format: LogFormat, work: impl FnOnce()) {
    let subscriber =
        tracing_subscriber::registry().with(LevelFilter::INFO).with(lines(format, std::io::stdout));
    tracing::subscriber::with_default(subscriber, work);
}

fn lines<S, W>(format: LogFormat, to: W) -> Box<dyn Layer<S> + Send + Sync>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let lines = fmt::layer().with_writer(to).with_target(false);
    match format {
        LogFormat::Text => lines.boxed(),
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
    }
}

fn filter_of(level: Severity) -> LevelFilter {
    match level {
        Severity::Error => LevelFilter::ERROR,
        Severity::Warn => LevelFilter::WARN,
        Severity::Info => LevelFilter::INFO,
        Severity::Debug => LevelFilter::DEBUG,
    }
}

// === impl LogLevel ===

impl LogLevel {
    /// The current level; `None` if [`start_logging`] was not called, as the process has another log.
    pub fn get(&self) -> Option<Severity> {
        let state = self.0.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner);
        Some(state.level)
    }

    /// Changes the level and returns the previous one; `None` if the level cannot be changed.
    pub fn set_level(&self, level: Severity) -> Option<Severity> {
        let mut state = self.0.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner);
        state.filter.reload(filter_of(level)).ok()?;
        Some(std::mem::replace(&mut state.level, level))
    }
}
