use super::*;

const NOW: &str = r#"# HELP pillion_ssd_down 1 while the device is treated as broken: its blocks are misses, and nothing is written.
# TYPE pillion_ssd_down gauge
pillion_ssd_down{device="/mnt/a"} 1
pillion_ssd_down{device="/mnt/b"} 0
pillion_build_info{version="0.3.0"} 1
process_start_time_seconds 1000
process_resident_memory_bytes 1610612736
pillion_pool_bytes 1073741824
pillion_pool_used_bytes 268435456
pillion_blocks 1234567
pillion_saved_bytes_total 3145728
pillion_query_blocks_total 300
pillion_query_hit_blocks_total 150
pillion_query_duration_seconds_bucket{part="whole",le="0.0001"} 1
pillion_query_duration_seconds_bucket{part="whole",le="0.001"} 98
pillion_query_duration_seconds_bucket{part="whole",le="+Inf"} 100
pillion_query_duration_seconds_sum{part="whole"} 0.05
pillion_query_duration_seconds_count{part="whole"} 100
pillion_query_duration_seconds_count{part="waiting"} 7
pillion_forecast_blocks_total 400
pillion_forecast_hit_blocks_total{dram="0.5"} 100
pillion_forecast_hit_blocks_total{dram="endless"} 300
pillion_handover_queries_total 9
pillion_handover_beyond_limit_total 1
pillion_handover_without_producer_total 2
pillion_handover_exhausted_total 4
pillion_handover_blocks_total 50
pillion_handover_lost_total{reason="reuse"} 5
pillion_handover_lost_total{reason="dropped"} 1
pillion_handover_kept_bytes 1048576
pillion_engine_state{engine="<b>\"one\"",state="serving"} 1
pillion_engine_state{engine="<b>\"one\"",state="barred"} 0
pillion_engine_bytes{engine="<b>\"one\"",kind="kept"} 2048
"#;
const BEFORE: &str =
    "pillion_saved_bytes_total 1048576\npillion_query_blocks_total 200\npillion_query_hit_blocks_total 140\n";

fn overview(before: Option<&Samples>) -> Overview {
    let before = before.map(|samples| (samples, Duration::from_secs(2)));
    Overview::new(&Samples::parse_text(NOW), before, Duration::from_secs(1010))
}

fn row<'a>(overview: &'a Overview, title: &str, first: &str) -> &'a [String] {
    let section = overview.sections.iter().find(|section| section.title == title).expect(title);
    section.rows.iter().find(|row| row[0] == first).expect(first)
}

#[test]
fn figures_are_of_the_time_between() {
    let found = overview(Some(&Samples::parse_text(BEFORE)));
    assert_eq!(found.heading, "Pillion 0.3.0, up for 10.0 s, 1.5 GiB of memory in use");
    assert_eq!(
        row(&found, "Tiers", "memory"),
        ["memory", "256 MiB", "25.0 %", "1,234,567", "1.0 MiB/s", "0 B/s", "0/s"]
    );
    assert_eq!(row(&found, "Hits", "since the start"), ["since the start", "300", "150", "50.0 %"]);
    assert_eq!(row(&found, "Hits", "now"), ["now", "100", "10", "10.0 %"]);
    assert_eq!(row(&found, "Hits of other pool sizes", "0.5 times --dram")[1], "25.0 %");
    assert_eq!(row(&found, "Hits of other pool sizes", "endless")[1], "75.0 %");
    assert_eq!(row(&found, "Handovers", "9"), ["9", "4", "3", "50", "6", "1.0 MiB"]);
    assert_eq!(row(&found, "Engines", "<b>\"one\"")[1..3], ["serving", "2.0 KiB"]);
    assert!(
        found.sections.iter().all(|section| section.title != "Peers"),
        "a table without rows is left out"
    );
}

#[test]
fn without_an_earlier_moment_rates_are_averages_since_the_start() {
    let found = overview(None);
    assert_eq!(row(&found, "Tiers", "memory")[4], "307 KiB/s");
    assert_eq!(
        row(&found, "Transfers", "queries"),
        ["queries", "100", "10/s", "500 us", "<= 1.0 ms", "more"]
    );
}

#[test]
fn what_is_wrong_is_said_with_its_remedy() {
    let said = "pillion_ssd_down (device /mnt/a) is 1: 1 while the device is treated as broken: its blocks are misses, and nothing is written.";
    assert_eq!(overview(None).alarms, [said]);
}

#[test]
fn names_cannot_write_the_page() {
    let page = render_page(&overview(None), "ready");
    assert!(page.contains("&lt;b&gt;&quot;one&quot;") && !page.contains("<b>"), "{page}");
}

#[test]
fn figures_as_people_read_them() {
    assert_eq!(
        [0.0, 999.0, 1000.0, 123_456.0, 12_345_678.0, 0.25].map(format_count),
        ["0", "999", "1,000", "123,456", "12.3 million", "0.2"]
    );
    assert_eq!([0.0, 1023.0, 1536.0, 5e12].map(format_bytes), ["0 B", "1023 B", "1.5 KiB", "4.5 TiB"]);
    assert_eq!(
        [0.000_002, 0.0015, 1.5, 600.0, 7200.0, 1e6].map(format_time),
        ["2 us", "1.5 ms", "1.5 s", "10 min", "2 h", "12 d"]
    );
}
