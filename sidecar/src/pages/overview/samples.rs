//! Parses a sidecar's metrics in the text format of Prometheus, and formats numbers for people.

use std::collections::BTreeMap;

/// Labels and their values, in the order of the text.
pub(super) type Labels = Vec<(String, String)>;

/// All samples of one text.
#[derive(Clone, Debug, Default)]
pub struct Samples {
    series: BTreeMap<String, Vec<(Labels, f64)>>,
    help: BTreeMap<String, String>,
}

// === impl Samples ===

impl Samples {
    /// Parses a text and skips lines that are not samples.
    pub fn parse_text(text: &str) -> Self {
        let mut samples = Self::default();
        for line in text.lines() {
            if let Some((name, help)) = line.strip_prefix("# HELP ").and_then(|line| line.split_once(' ')) {
                samples.help.insert(name.to_owned(), help.replace("\\\\", "\\"));
            } else if let Some((name, labels, value)) = sample(line) {
                samples.series.entry(name).or_default().push((labels, value));
            }
        }
        samples
    }

    pub(super) fn series(&self, name: &str) -> impl Iterator<Item = (&Labels, f64)> {
        self.series.get(name).into_iter().flatten().map(|(labels, value)| (labels, *value))
    }

    /// The sum of all series of a name; with `chosen`, only of series with this label's value.
    pub(super) fn total(&self, name: &str, chosen: Option<(&str, &str)>) -> f64 {
        let has = |labels: &Labels| {
            chosen
                .is_none_or(|(label, value)| labels.iter().any(|(name, text)| name == label && text == value))
        };
        self.series(name).filter(|(labels, _)| has(labels)).map(|(_, value)| value).sum()
    }

    pub(super) fn sum(&self, name: &str) -> f64 {
        self.total(name, None)
    }

    /// The values of a label, each once, in order.
    pub(super) fn labels(&self, name: &str, label: &str) -> Vec<String> {
        let all = self.series(name).flat_map(|(labels, _)| labels).filter(|(name, _)| name == label);
        let mut found: Vec<String> = all.map(|(_, value)| value.clone()).collect();
        found.sort();
        found.dedup();
        found
    }

    pub(super) fn help(&self, name: &str) -> &str {
        self.help.get(name).map_or("", String::as_str)
    }

    /// The bound of the smallest bucket with at least `share` of the samples; `None` if only the bucket
    /// without a bound has them.
    pub(super) fn quantile(&self, name: &str, chosen: (&str, &str), share: f64) -> Option<f64> {
        let wanted = self.total(&format!("{name}_count"), Some(chosen)) * share;
        let buckets = format!("{name}_bucket");
        let of_it =
            self.series(&buckets).filter(|(labels, _)| labels.contains(&(chosen.0.into(), chosen.1.into())));
        let bounds = of_it.filter_map(|(labels, below)| {
            let bound = labels.iter().find(|(label, _)| label == "le")?.1.parse::<f64>().ok()?;
            (below >= wanted && bound.is_finite()).then_some(bound)
        });
        bounds.min_by(f64::total_cmp)
    }
}

/// Parses a line such as `name{label="value"} 1.5`.
fn sample(line: &str) -> Option<(String, Labels, f64)> {
    if line.starts_with('#') {
        return None;
    }
    let Some((name, rest)) = line.split_once('{') else {
        let (name, value) = line.split_once(' ')?;
        return Some((name.to_owned(), Labels::new(), value.trim().parse().ok()?));
    };
    let (mut labels, mut rest) = (Labels::new(), rest);
    loop {
        if let Some(value) = rest.strip_prefix('}') {
            return Some((name.to_owned(), labels, value.trim().parse().ok()?));
        }
        let (label, behind) = rest.trim_start_matches(',').split_once("=\"")?;
        let (value, behind) = quoted(behind)?;
        labels.push((label.to_owned(), value));
        rest = behind;
    }
}

/// A value up to its closing quote, and the rest of the text.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut letters = text.char_indices();
    while let Some((at, letter)) = letters.next() {
        match letter {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => match letters.next()?.1 {
                'n' => value.push('\n'),
                other => value.push(other),
            },
            other => value.push(other),
        }
    }
    None
}

/// Bytes with a unit, such as `1.5 GiB`.
pub(super) fn format_bytes(number: f64) -> String {
    scaled(number, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB"])
}

/// `12,345`, or `12.3 million` for large numbers.
pub(super) fn format_count(number: f64) -> String {
    if number >= 1e7 {
        return format!("{:.1} million", number / 1e6);
    }
    if number > 0.0 && number < 9.95 && number.fract() != 0.0 {
        return format!("{number:.1}");
    }
    let digits = format!("{number:.0}");
    let groups: Vec<&str> =
        digits.as_bytes().rchunks(3).rev().map(|group| str::from_utf8(group).expect("digits")).collect();
    groups.join(",")
}

pub(super) fn per_second(rate: f64, unit: impl Fn(f64) -> String) -> String {
    format!("{}/s", unit(rate))
}

/// A share in percent, or a dash for a share of nothing.
pub(super) fn format_share(part: f64, whole: f64) -> String {
    if whole > 0.0 { format!("{:.1} %", 100.0 * part / whole) } else { "-".into() }
}

/// `1.5 ms`, or `3 h` for longer times.
pub(super) fn format_time(seconds: f64) -> String {
    match seconds {
        long if long >= 172_800.0 => format!("{:.0} d", long / 86_400.0),
        long if long >= 7_200.0 => format!("{:.0} h", long / 3_600.0),
        long if long >= 120.0 => format!("{:.0} min", long / 60.0),
        long if long >= 1.0 => format!("{long:.1} s"),
        short => scaled(short * 1e6, 1000.0, &["us", "ms"]),
    }
}

/// A number in its largest unit of at least 1.
fn scaled(number: f64, step: f64, units: &[&str]) -> String {
    let (mut number, mut at) = (number, 0);
    while number >= step && at + 1 < units.len() {
        number /= step;
        at += 1;
    }
    if at == 0 || number >= 100.0 {
        format!("{number:.0} {}", units[at])
    } else {
        format!("{number:.1} {}", units[at])
    }
}
