//! `pillion doctor`: faults of this host, or of a pair of engines meant to share, each with its remedy.

mod control;
mod disk;
mod engines;
mod host;
mod mesh;
mod pair;
mod states;

use std::fmt::Write;
use std::path::PathBuf;

use clap::Args;
use serde::Serialize;
use thiserror::Error;

pub(crate) use self::host::{explain_unreached, send_probe};
use sidecar::config;

/// Most bytes of a configuration: the facts of one record, and room.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Options of `pillion doctor`.
#[derive(Args, Clone, Debug)]
pub struct DoctorOptions {
    /// Configurations of two engines, each as pillion ctl namespaces NAMESPACE prints it. Without them this host is
    /// checked
    #[arg(value_names = ["A.json", "B.json"], num_args = 2)]
    pub pair: Vec<PathBuf>,
    /// The sidecar's socket [default: as pillion serve]
    #[arg(long, env = "PILLION_SOCKET", value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// The sidecar's control socket [default: beside its socket]
    #[arg(long, env = "PILLION_CONTROL_SOCKET", value_name = "PATH")]
    pub control_socket: Option<PathBuf>,
    /// Disk to check, as pillion serve takes it. May be given several times
    #[arg(long, value_name = "PATH:SIZE[:create]")]
    pub ssd: Vec<config::Disk>,
    /// Memory for blocks, as pillion serve takes it; checks whether --nics can register so much
    #[arg(long, value_name = "SIZE")]
    pub dram: Option<config::Size>,
    /// Print a JSON array of {check, level, text, remedy}
    #[arg(long)]
    pub json: bool,
    /// Options of the mesh, as pillion serve takes them. Addresses, names, certificates and NICs are checked.
    #[command(
        flatten,
        next_help_heading = "Options of the mesh, as pillion serve takes them; --mesh-listen, --peer, certificates and --nics are checked"
    )]
    pub mesh: config::MeshOptions,
}

/// The severity of a finding.
#[derive(Copy, Clone, Debug, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FindingLevel {
    /// No harm.
    Ok,
    /// Some engines or features are not served.
    Warn,
    /// Nothing is shared, or requests fail.
    Fail,
}

/// The result of one check.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub struct Finding {
    /// The name of the check, in one word.
    pub check: String,
    /// The severity.
    pub level: FindingLevel,
    pub text: String,
    /// The change to make, if one is needed.
    pub remedy: Option<String>,
}

/// A check that is not possible; the text names the remedy.
#[derive(Debug, Error)]
pub enum DoctorError {
    /// An unreadable file.
    #[error("cannot read {path}: {source}")]
    Unreadable { path: PathBuf, source: std::io::Error },
    /// A file without a namespace entry.
    #[error(
        "{path} is not a namespace entry ({text}): pass one as pillion ctl namespaces NAMESPACE prints it"
    )]
    Malformed { path: PathBuf, text: String },
}

/// Runs the checks of the options.
pub fn examine_node(options: &DoctorOptions) -> Result<Vec<Finding>, DoctorError> {
    if let [one, other] = options.pair.as_slice() {
        return Ok(pair::compare_engines(
            &pair::PairEngine::read_file(one)?,
            &pair::PairEngine::read_file(other)?,
        ));
    }
    let socket = options.socket.clone().unwrap_or_else(config::default_socket);
    let mut found = host::check_host(&socket);
    if found.iter().any(|finding| finding.check == host::SIDECAR && finding.level == FindingLevel::Ok) {
        let beside = || config::default_control_socket(&socket);
        found.extend(control::check_namespaces(&options.control_socket.clone().unwrap_or_else(beside)));
    }
    found.extend(engines::check_engines());
    found.extend(options.ssd.iter().map(disk::check_disk));
    found.extend(mesh::check_mesh(&options.mesh, options.dram));
    Ok(found)
}

/// The findings as a person reads them, or as JSON.
pub fn report_findings(findings: &[Finding], json: bool) -> String {
    if json {
        return serde_json::to_string_pretty(findings).expect("texts alone") + "\n";
    }
    let mut report = String::new();
    for Finding { check, level, text, remedy } in findings {
        let level = match level {
            FindingLevel::Ok => "ok  ",
            FindingLevel::Warn => "warn",
            FindingLevel::Fail => "FAIL",
        };
        writeln!(report, "{level}  {check}: {text}").expect("a String takes all");
        if let Some(remedy) = remedy {
            writeln!(report, "      -> {remedy}").expect("a String takes all");
        }
    }
    report
}

/// Returns true if nothing must be changed.
pub fn findings_pass(findings: &[Finding]) -> bool {
    findings.iter().all(|finding| finding.level < FindingLevel::Fail)
}

// === impl Finding ===

impl Finding {
    fn ok(check: impl Into<String>, text: impl Into<String>) -> Self {
        Self { check: check.into(), level: FindingLevel::Ok, text: text.into(), remedy: None }
    }

    fn bad(
        level: FindingLevel,
        check: impl Into<String>,
        text: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self { check: check.into(), level, text: text.into(), remedy: Some(remedy.into()) }
    }
}
