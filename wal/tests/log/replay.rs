//! What was written is there after a restart.

use crate::support::{append, blocks, data, small, start, sync, write};
use wal::{LogDir, Lsn, Record, RecoveredKind, ZeroKind};

// Fails when a synced record is lost, changed or reordered by a restart.
#[test]
fn synced_records_are_replayed_in_order() {
    let dir = tempfile::tempdir().unwrap();
    {
        let logs = LogDir::open(small(dir.path())).unwrap();
        let (log, records) = start(&logs, 1, 0);
        assert!(records.is_empty());
        for i in 0..300 {
            write(&log, i * 7, i, 1 + (i as usize % 5));
        }
        append(&log, Record::Zero { first_block: 9, count: 1 << 40, kind: ZeroKind::Discard });
        let last = append(&log, Record::Barrier { payload: b"here" });
        sync(&log, last);
    }
    let logs = LogDir::open(small(dir.path())).unwrap();
    assert_eq!(logs.owners(), [crate::support::owner(1)]);
    let (log, records) = start(&logs, 1, 0);
    assert_eq!(records.len(), 302);
    for (i, record) in (0..300).zip(&records) {
        assert_eq!(record.lsn, Lsn::new(i + 1));
        assert_eq!(record.first_block, i * 7);
        assert_eq!(data(record), blocks(i, 1 + (i as usize % 5)));
    }
    assert_eq!(records[300].kind, RecoveredKind::Zero(ZeroKind::Discard));
    assert_eq!((records[300].first_block, records[300].count), (9, 1 << 40));
    assert_eq!(records[301].payload_blocking().unwrap(), b"here");
    assert_eq!(write(&log, 0, 1, 1), Lsn::new(303));
}
