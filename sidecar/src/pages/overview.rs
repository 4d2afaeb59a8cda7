//! An overview of a sidecar in a few tables, from the text of its `/metrics`: for the page `/` and for
//! `pillion top`. No I/O.

mod html;
mod samples;

use std::time::Duration;

pub use self::html::render_page;
pub use self::samples::Samples;
use self::samples::{format_bytes, format_count, format_share, format_time, per_second};

/// Transfers: the histogram, the label and value of one series, and its title.
const TIMED: [(&str, (&str, &str), &str); 5] = [
    ("pillion_query_duration_seconds", ("part", "whole"), "queries"),
    ("pillion_load_duration_seconds", ("part", "whole"), "loads"),
    ("pillion_save_duration_seconds", ("part", "whole"), "saves"),
    ("pillion_block_read_duration_seconds", ("source", "disk"), "reads from disks"),
    ("pillion_block_read_duration_seconds", ("source", "peer"), "reads from peers"),
];
/// Metrics shown as alarms when above 0; their help texts say what to do.
const ALARMS: [&str; 10] = [
    "pillion_pool_lost",
    "pillion_parked_ranks",
    "pillion_barred_engines",
    "pillion_ssd_down",
    "pillion_ssd_left_out",
    "pillion_mesh_peer_breaker_open",
    "pillion_mesh_endpoints_empty",
    "pillion_mesh_peer_names_unresolved",
    "pillion_checks_differing_total",
    "pillion_connections_refused_total",
];

/// A table: its title, its columns, and its rows. A table without rows is left out.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Section {
    pub title: &'static str,
    pub columns: &'static [&'static str],
    pub rows: Vec<Vec<String>>,
}

/// The tables and the alarms of one moment.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Overview {
    pub heading: String,
    pub sections: Vec<Section>,
    pub alarms: Vec<String>,
}

/// Two moments: now and an earlier one. Without the earlier one, rates are averages since the start.
struct SampleSpan<'a> {
    now: &'a Samples,
    before: Option<&'a Samples>,
    seconds: f64,
}

// === impl Overview ===

impl Overview {
    /// The overview of `now`, at `since_1970`. Rates cover the time since `before`, samples of so long ago.
    pub fn new(now: &Samples, before: Option<(&Samples, Duration)>, since_1970: Duration) -> Self {
        let up = (since_1970.as_secs_f64() - now.sum("process_start_time_seconds")).max(1.0);
        let seconds = before.map_or(up, |(_, ago)| ago.as_secs_f64());
        let span = SampleSpan { now, before: before.map(|(samples, _)| samples), seconds };
        let version = now.labels("pillion_build_info", "version").into_iter().next().unwrap_or_default();
        let memory = format_bytes(now.sum("process_resident_memory_bytes"));
        let sections = vec![
            span.tiers(),
            span.hits(),
            span.worth(),
            span.transfers(),
            span.handovers(),
            span.engines(),
            span.peers(),
        ];
        Self {
            heading: format!("Pillion {version}, up for {}, {memory} of memory in use", format_time(up)),
            sections: sections.into_iter().filter(|section| !section.rows.is_empty()).collect(),
            alarms: alarms(now),
        }
    }
}

fn alarms(now: &Samples) -> Vec<String> {
    let mut found = Vec::new();
    for name in ALARMS {
        for (labels, value) in now.series(name).filter(|(_, value)| *value > 0.0) {
            let which: Vec<_> = labels.iter().map(|(label, value)| format!("{label} {value}")).collect();
            let which = if which.is_empty() { String::new() } else { format!(" ({})", which.join(", ")) };
            found.push(format!("{name}{which} is {}: {}", format_count(value), now.help(name)));
        }
    }
    found
}

// === impl SampleSpan ===

impl SampleSpan<'_> {
    /// The growth of a counter in a second.
    fn rate(&self, name: &str, chosen: Option<(&str, &str)>) -> f64 {
        let of = |samples: &Samples| samples.total(name, chosen);
        // A restarted counter begins at 0 again.
        (of(self.now) - self.before.map_or(0.0, of)).max(0.0) / self.seconds
    }

    fn tiers(&self) -> Section {
        let used = self.now.sum("pillion_pool_used_bytes");
        let pool = self.now.sum("pillion_pool_bytes");
        let rows = (pool > 0.0).then(|| {
            vec![
                "memory".into(),
                format_bytes(used),
                format_share(used, pool),
                format_count(self.now.sum("pillion_blocks")),
                per_second(self.rate("pillion_saved_bytes_total", None), format_bytes),
                per_second(self.rate("pillion_loaded_bytes_total", None), format_bytes),
                per_second(self.rate("pillion_evicted_blocks_total", None), format_count),
            ]
        });
        let disk = |device: &String| {
            let chosen = Some(("device", device.as_str()));
            let of = |name| self.now.total(name, chosen);
            let (segments, free) = (of("pillion_ssd_segments"), of("pillion_ssd_segments_free"));
            vec![
                device.clone(),
                format_bytes(of("pillion_ssd_used_bytes")),
                format_share(segments - free, segments),
                format_count(of("pillion_ssd_blocks")),
                per_second(self.rate("pillion_ssd_written_bytes_total", chosen), format_bytes),
                per_second(self.rate("pillion_ssd_read_bytes_total", chosen), format_bytes),
                per_second(self.rate("pillion_ssd_evicted_blocks_total", chosen), format_count),
            ]
        };
        let disks = self.now.labels("pillion_ssd_used_bytes", "device");
        Section {
            title: "Tiers",
            columns: &["tier", "used", "full", "blocks", "in", "out", "evicted"],
            rows: rows.into_iter().chain(disks.iter().map(disk)).collect(),
        }
    }

    fn hits(&self) -> Section {
        let row = |name: &str, asked: f64, found: f64| {
            vec![name.to_owned(), format_count(asked), format_count(found), format_share(found, asked)]
        };
        let of = |samples: &Samples| {
            (samples.sum("pillion_query_blocks_total"), samples.sum("pillion_query_hit_blocks_total"))
        };
        let (asked, found) = of(self.now);
        let mut rows = vec![row("since the start", asked, found)];
        if let Some(before) = self.before {
            let (asked_before, found_before) = of(before);
            rows.push(row("now", (asked - asked_before).max(0.0), (found - found_before).max(0.0)));
        }
        Section { title: "Hits", columns: &["queries", "blocks asked", "blocks found", "share"], rows }
    }

    /// Forecast hits of pools of other sizes.
    fn worth(&self) -> Section {
        let asked = self.now.sum("pillion_forecast_blocks_total");
        let hits = "pillion_forecast_hit_blocks_total";
        let sizes = self.now.labels(hits, "dram").into_iter().filter(|_| asked > 0.0);
        let row = |size: String| {
            let found = self.now.total(hits, Some(("dram", &size)));
            let name = if size == "endless" { size } else { format!("{size} times --dram") };
            vec![name, format_share(found, asked)]
        };
        Section {
            title: "Hits of other pool sizes",
            columns: &["memory", "share"],
            rows: sizes.map(row).collect(),
        }
    }

    fn transfers(&self) -> Section {
        let row = |(name, chosen, words): &(&str, (&str, &str), &str)| {
            let ended = self.now.total(&format!("{name}_count"), Some(*chosen));
            (ended > 0.0).then(|| {
                let below = |share| {
                    self.now
                        .quantile(name, *chosen, share)
                        .map_or("more".to_owned(), |seconds| format!("<= {}", format_time(seconds)))
                };
                let rate = self.rate(&format!("{name}_count"), Some(*chosen));
                let mean = self.now.total(&format!("{name}_sum"), Some(*chosen)) / ended;
                vec![
                    (*words).to_owned(),
                    format_count(ended),
                    per_second(rate, format_count),
                    format_time(mean),
                    below(0.5),
                    below(0.99),
                ]
            })
        };
        Section {
            title: "Transfers",
            columns: &["what", "ended", "rate", "mean", "half", "99 of 100"],
            rows: TIMED.iter().filter_map(row).collect(),
        }
    }

    /// Prompts computed by one engine for another engine.
    fn handovers(&self) -> Section {
        let of = |name: &str| self.now.sum(&format!("pillion_handover_{name}"));
        let row = vec![
            format_count(of("queries_total")),
            format_count(of("exhausted_total")),
            format_count(of("without_producer_total") + of("beyond_limit_total")),
            format_count(of("blocks_total")),
            format_count(of("lost_total")),
            format_bytes(of("kept_bytes")),
        ];
        let any = of("queries_total") + of("blocks_total") > 0.0;
        Section {
            title: "Handovers",
            columns: &["asked for", "wait ended", "did not wait", "blocks given", "blocks lost", "kept now"],
            rows: any.then_some(row).into_iter().collect(),
        }
    }

    fn engines(&self) -> Section {
        let row = |engine: &String| {
            let states = self.now.series("pillion_engine_state").filter(|(labels, value)| {
                *value > 0.0 && labels.iter().any(|(label, value)| label == "engine" && value == engine)
            });
            let state =
                states.filter_map(|(labels, _)| Some(&labels.iter().find(|(label, _)| label == "state")?.1));
            let held = |kind: &str| {
                let mut series = self.now.series("pillion_engine_bytes");
                let found = series.find(|(labels, _)| {
                    labels.contains(&("engine".into(), engine.clone()))
                        && labels.contains(&("kind".into(), kind.into()))
                });
                format_bytes(found.map_or(0.0, |(_, value)| value))
            };
            let state = state.map(String::as_str).collect::<Vec<_>>().join(", ");
            vec![engine.clone(), state, held("kept"), held("filling"), held("leased"), held("promised")]
        };
        Section {
            title: "Engines",
            columns: &["engine", "state", "kept", "being filled", "leased", "promised"],
            rows: self.now.labels("pillion_engine_state", "engine").iter().map(row).collect(),
        }
    }

    fn peers(&self) -> Section {
        let row = |peer: &String| {
            let of = |name| self.now.total(name, Some(("peer", peer.as_str())));
            let state = if of("pillion_mesh_peer_breaker_open") > 0.0 { "skipped" } else { "up" };
            vec![
                peer.clone(),
                state.to_owned(),
                format_count(of("pillion_mesh_peer_keys")),
                format_count(of("pillion_mesh_peer_asked")),
                format_count(of("pillion_mesh_peer_breaker_trips_total")),
            ]
        };
        Section {
            title: "Peers",
            columns: &["peer", "state", "blocks known", "requested now", "times skipped"],
            rows: self.now.labels("pillion_mesh_peer_keys", "peer").iter().map(row).collect(),
        }
    }
}

#[cfg(test)]
mod tests;
