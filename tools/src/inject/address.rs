//! The URL by which other pods reach the engine, for routers of the mesh.

use super::engine::{find_servers, is_script, list_options, list_words, option_values, stated_role};
use super::yaml::Node;
use super::{InjectOptions, KvRole};

/// vLLM's port, unless its command line has another.
const PORT_DEFAULT: u16 = 8000;

/// Returns the sidecar's `--engine-url` for an engine, or the reason why it is unknown.
pub(super) fn find_engine_url(container: &Node, options: &InjectOptions) -> Result<String, String> {
    let stated = served_options(container)?;
    let has = |option: &str| option_values(&stated, option).next().is_some();
    for (option, reason) in [
        ("--uds", "it serves a Unix socket (--uds)"),
        ("--headless", "it serves no requests (--headless)"),
        ("--ssl-certfile", "its certificate (--ssl-certfile) has a name of its own"),
    ] {
        if has(option) {
            return Err(reason.to_owned());
        }
    }
    let is_local = |host: &str| host.starts_with("127.") || ["localhost", "::1"].contains(&host);
    if let Some(host) = option_values(&stated, "--host").find(|host| is_local(host)) {
        return Err(format!("no other pod reaches its --host {host}"));
    }
    let role = match stated_role(container)?.unwrap_or(options.kv_role) {
        KvRole::KvBoth => "both",
        KvRole::KvProducer => "prefill",
        KvRole::KvConsumer => "decode",
    };
    Ok(format!("http://$(POD_IP):{}={role}", find_port(container, &stated)?))
}

/// The words of vLLM's options; in a script those of its only server.
fn served_options(container: &Node) -> Result<Vec<String>, String> {
    let mut found = Vec::new();
    for word in list_words(container) {
        if !is_script(&word) {
            found.extend(list_options(&word));
            continue;
        }
        let [place] = find_servers(&word)[..] else {
            return Err("its script starts several servers".to_owned());
        };
        let command = word[place..].replace("\\\n", " ");
        found.extend(list_options(command.split([';', '&', '|', '\n']).next().unwrap_or_default()));
    }
    Ok(found)
}

/// The port of vLLM's command line, or of its container if a variable or a file may hold it; otherwise vLLM's default.
fn find_port(container: &Node, stated: &[String]) -> Result<u16, String> {
    let ports: Vec<&str> = option_values(stated, "--port").collect();
    let exposed: Vec<u16> = container
        .items_of("ports")
        .iter()
        .filter(|port| port.text_at(&["protocol"]).is_none_or(|protocol| protocol == "TCP"))
        .filter_map(|port| port.text_at(&["containerPort"])?.parse().ok())
        .collect();
    let is_open = option_values(stated, "--config").next().is_some();
    match (&ports[..], &exposed[..]) {
        ([port], _) if let Ok(port) = port.parse() => Ok(port),
        ([_] | [], [port]) => Ok(*port),
        ([], []) if !is_open => Ok(PORT_DEFAULT),
        ([], several) if !is_open && several.contains(&PORT_DEFAULT) => Ok(PORT_DEFAULT),
        _ => {
            Err("its port is unknown: --port has no number, and the container no single containerPort"
                .to_owned())
        }
    }
}
