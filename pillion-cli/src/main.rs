//! The `pillion` command: configuration, then build, spawn, wait, drain.
//!
//! Job: read the command line, run its command of sidecar, router or tools, print the answer, and end with the right status; as
//! process 1, be the sidecar's parent ([`init`]).
//!
//! May depend on: sidecar, router, tools, shm-protocol. Never: does a command's work, holds unsafe code outside [`heap`].

#![deny(unsafe_code)]

#[expect(unsafe_code, reason = "a setting of the C library")]
mod heap;
mod init;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{CommandFactory, Parser, Subcommand};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::SignalFd;
use rustix::event::{PollFd, PollFlags};
use sidecar::config::{self, ConfigError, LogFormat, ServeConfig, ServeOptions, Severity};
use sidecar::error::StartError;
use sidecar::logging::{self, LogLevel};
use sidecar::runtime::server::Server;
use tokio::sync::{Notify, oneshot};
use tools::{bench, connector, ctl, doctor, facts, inject, keys, reference, top};

/// The longest time for copies in flight after SIGTERM: at 30 GiB/s any engine's step takes a fraction of it,
/// and Kubernetes waits for 30 s.
const GRACE: Duration = Duration::from_secs(5);
/// The same with disks or peers, which get the blocks in memory: 10 s less than Kubernetes' default.
const GRACE_LONG: Duration = Duration::from_secs(20);

/// Pillion keeps a vLLM pod's KV cache in DRAM and on SSD, and shares it with other pods.
#[derive(Parser)]
#[command(name = "pillion", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve the engines of this host until SIGTERM.
    Serve {
        /// File with the same options, as `name = "value"` lines of TOML; an option with several values has a list.
        /// Flags and environment variables override it.
        #[arg(long, value_name = "FILE.toml")]
        config: Option<PathBuf>,
        /// Set by the process 1 that started this one; see `init`.
        #[arg(long, hide = true)]
        below_init: bool,
        #[command(flatten)]
        options: Box<ServeOptions>,
    },
    /// Query or control a running sidecar; see docs/configuration.md.
    Ctl(ctl::CtlOptions),
    /// Derive block keys as vLLM does: one JSON object a line on standard input, one answer a line on standard
    /// output; see docs/keys.md.
    Keys,
    /// Print what an engine must state to share blocks with others: the digest of its weight files, and the names of
    /// all other facts.
    Facts(facts::FactsOptions),
    /// Add sidecars to Kubernetes manifests: reads standard input, writes standard output; see docs/deploy.md.
    Inject(inject::InjectOptions),
    /// Copy the connector for vLLM into a folder; an init container does so in the engine's pod.
    Connector(connector::ConnectorOptions),
    /// Route for disaggregated prefill: one engine computes a prompt, another answers it; see docs/prefill-decode.md.
    Route(Box<router::RouteOptions>),
    /// Check this host, or two engines meant to share blocks. Exit status: 0 nothing to change, 1 something
    /// to change, 2 an unreadable file.
    Doctor(Box<doctor::DoctorOptions>),
    /// Show live the work of a running sidecar: tiers, hits, transfers, engines, peers. The key q ends it.
    Top(top::TopOptions),
    /// Measure this machine, and how close Pillion comes to its limits; see docs/capacity.md.
    Bench(bench::BenchOptions),
    /// Print the release and the protocol version.
    Version,
    /// Print all commands and their options as JSON, from which scripts/options writes docs/options.md.
    #[command(hide = true)]
    Options,
}

/// Exit status of a sidecar that does not start: its options do not fit this host.
const NOT_STARTED: u8 = 2;

fn main() -> ExitCode {
    run_command(Arguments::parse().command).unwrap_or_else(|error| {
        eprintln!("pillion: {}", error_text(&error));
        failure(&error)
    })
}

/// The exit status for an error. Only the error's text is printed: a trace of functions names no remedy.
fn failure(error: &anyhow::Error) -> ExitCode {
    if is_not_started(error) { ExitCode::from(NOT_STARTED) } else { ExitCode::FAILURE }
}

fn is_not_started(error: &anyhow::Error) -> bool {
    error.is::<ConfigError>() || error.is::<StartError>()
}

/// An error with its causes, except those in its text.
fn error_text(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

fn run_command(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Serve { below_init: false, .. } if std::process::id() == 1 => init::serve_as_child(),
        Command::Serve { config, below_init, options } => {
            if below_init {
                init::die_with_parent()?;
            }
            let file = config.as_deref().map(ServeOptions::read_file).transpose()?.unwrap_or_default();
            let config = options.or(file).complete()?;
            let log = logging::start_logging(config.log_level, config.log_format);
            Ok(serve_until_signal(&config, log).map_or_else(
                |error| {
                    tracing::error!("{}", error_text(&error));
                    failure(&error)
                },
                |()| ExitCode::SUCCESS,
            ))
        }
        Command::Ctl(options) => {
            print_answer(&ctl::ask_sidecar(&options)?);
            Ok(ExitCode::SUCCESS)
        }
        Command::Keys => {
            keys::answer_questions(std::io::stdin().lock(), std::io::stdout().lock())?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Facts(options) => print_facts(&options),
        Command::Inject(options) => {
            inject::inject_stream(
                std::io::stdin().lock(),
                std::io::stdout().lock(),
                std::io::stderr().lock(),
                &options,
            )?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Connector(options) => {
            print_answer(&connector::copy_connector(&options)?);
            Ok(ExitCode::SUCCESS)
        }
        Command::Route(options) => run_router(*options),
        Command::Doctor(options) => Ok(examine(&options)),
        Command::Top(options) => {
            top::show_tables(&options, print_answer)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Bench(options) => {
            logging::start_logging(Severity::Warn, LogFormat::Text);
            print_answer(&bench::run_bench(&options, print_answer)?);
            Ok(ExitCode::SUCCESS)
        }
        Command::Version => {
            print_version();
            Ok(ExitCode::SUCCESS)
        }
        Command::Options => {
            print_options();
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Runs the router until a signal ends it. SIGHUP has its files read again.
fn run_router(options: router::RouteOptions) -> anyhow::Result<ExitCode> {
    heap::return_large_blocks();
    logging::start_logging(options.log_level, options.log_format);
    let signals = signals(&[Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP])?;
    let (tell, told) = oneshot::channel();
    let reload = Arc::new(Notify::new());
    let reloads = Arc::clone(&reload);
    let watch = move || loop {
        match signals.read_signal() {
            Ok(Some(told)) if told.ssi_signo == Signal::SIGHUP as u32 => reloads.notify_one(),
            Ok(Some(_)) => {
                let _ = tell.send(());
                break;
            }
            // The read was interrupted.
            _ => {}
        }
    };
    std::thread::Builder::new().name("pillion-signals".into()).spawn(watch)?;
    router::serve_router(options, reload, async { drop(told.await) }, GRACE_LONG)?;
    Ok(ExitCode::SUCCESS)
}

#[expect(clippy::print_stdout, reason = "this is what the user asked for")]
fn print_version() {
    println!("pillion {}, protocol {}", env!("CARGO_PKG_VERSION"), shm_protocol::PROTOCOL_VERSION);
}

#[expect(clippy::print_stdout, reason = "this is what the user asked for")]
fn print_options() {
    let mut program = Arguments::command();
    program.build();
    println!("{:#}", serde_json::Value::Array(reference::list_commands(&program)));
}

#[expect(clippy::print_stdout, reason = "this is what the user asked for")]
fn print_answer(answer: &str) {
    print!("{answer}");
}

#[expect(clippy::print_stdout, reason = "this is what the user asked for")]
fn print_facts(options: &facts::FactsOptions) -> anyhow::Result<ExitCode> {
    print!("{}", facts::report_facts(options)?);
    Ok(ExitCode::SUCCESS)
}

#[expect(clippy::print_stdout, reason = "this is what the user asked for")]
fn examine(options: &doctor::DoctorOptions) -> ExitCode {
    match doctor::examine_node(options) {
        Ok(findings) => {
            print!("{}", doctor::report_findings(&findings, options.json));
            ExitCode::from(u8::from(!doctor::findings_pass(&findings)))
        }
        Err(error) => {
            eprintln!("pillion doctor: {error}");
            ExitCode::from(2)
        }
    }
}

fn serve_until_signal(config: &ServeConfig, log: LogLevel) -> anyhow::Result<()> {
    let signals = signals(&[Signal::SIGTERM, Signal::SIGINT])?;
    // A write beyond RLIMIT_FSIZE is an error of this write.
    SigSet::from(Signal::SIGXFSZ).thread_block().context("cannot block signals")?;
    for name in config::find_mistyped(&reference::list_variables(&Arguments::command())) {
        tracing::warn!("the environment variable {name} belongs to no option: correct its name, or unset it");
    }
    let server = Server::start(config, log)?;
    let [control, score] =
        [server.control(), server.score()].map(|address| address.map(tracing::field::display));
    let http = server.http();
    tracing::info!(socket = %server.socket().display(), %http, control, score, dram = %config.dram, "serving");
    let asked = wait_for_end(&signals, &server)?;
    if !asked {
        bail!("a thread of the sidecar ended with a panic, shown above: report it with the log");
    }
    tracing::info!("draining");
    let is_short = config.ssd.is_empty() && config.mesh.is_none();
    let grace = if is_short { GRACE } else { GRACE_LONG };
    server.drain(grace)?;
    tracing::info!("drained");
    Ok(())
}

/// A descriptor, readable once one of these signals has come. Called before any thread starts, so no thread
/// takes the signal itself.
fn signals(watched: &[Signal]) -> anyhow::Result<SignalFd> {
    let signals: SigSet = watched.iter().copied().collect();
    signals.thread_block().context("cannot block signals")?;
    SignalFd::new(&signals).context("cannot watch signals")
}

/// Waits for SIGTERM, SIGINT or an operator's drain request (true), or for the end of a thread (false).
fn wait_for_end(signals: &SignalFd, server: &Server) -> anyhow::Result<bool> {
    let (ended, asked) = (server.end_signal(), server.asked());
    let mut watched = [
        PollFd::new(signals, PollFlags::IN),
        PollFd::new(&ended, PollFlags::IN),
        PollFd::new(&asked, PollFlags::IN),
    ];
    loop {
        match rustix::event::poll(&mut watched, None) {
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => return Ok(watched[1].revents().is_empty()),
            Err(error) => return Err(error).context("cannot wait for signals"),
        }
    }
}
