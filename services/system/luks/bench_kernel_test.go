//go:build kernel

package luks

import (
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/garboard-os/garboard/services/core/process"
	"github.com/garboard-os/garboard/tools/testing/loopdisk"
)

// budgetOpen is for both volumes of the system's disk at a start, beside what others do meanwhile.
const budgetOpen = 500 * time.Millisecond

// What encryption costs: a nodeID key opens its volume, and what is read and written then, beside the same disk
// without encryption. User Mode Linux runs at the speed of the processor, without its instructions for AES.
func BenchmarkEncryption(b *testing.B) {
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	defer w.Flush()
	row := func(format string, args ...any) { fmt.Fprintf(w, format+"\n", args...) }
	uuid := filepath.Join(b.TempDir(), "uuid")
	if err := os.WriteFile(uuid, []byte("0d1f3b52-77c9-4e1a-a3c4-2b96f08d54e6\n"), 0o600); err != nil {
		b.Fatal(err)
	}
	passphrase, err := NodePassphrase(uuid, "EPHEMERAL")
	if err != nil {
		b.Fatal(err)
	}
	l := &Layer{
		Label: "EPHEMERAL", Derivation: Derivation, Processes: process.New(), Log: slog.New(slog.DiscardHandler),
		Keys: func() ([]Key, error) { return []Key{{Kind: "nodeID", Passphrase: passphrase}}, nil },
		Kept: func() ([]Key, error) { return nil, nil }, Keep: func([]Key) error { return nil },
	}
	const size = 256 << 20
	device := loopdisk.New(b, size+64<<20).Path
	plainWrites, plainReads := throughput(b, device, size)
	if err := os.WriteFile(device, make([]byte, 64<<20), 0); err != nil {
		b.Fatal(err)
	}
	if err := l.Create(b.Context(), device); err != nil {
		b.Fatal(err)
	}
	if err := l.Close(); err != nil {
		b.Fatal(err)
	}
	start := time.Now()
	above, err := l.Open(b.Context(), device)
	if err != nil {
		b.Fatal(err)
	}
	both := 2 * time.Since(start)
	writes, reads := throughput(b, above, size)
	if err := l.Close(); err != nil {
		b.Error(err)
	}
	row("WHAT\tFIGURE\tBUDGET")
	row("encryption: STATE and EPHEMERAL opened by nodeID keys\t%.2f s\t≤ %.1f s", both.Seconds(), budgetOpen.Seconds())
	row("encryption: writes, beside those of the plain disk\t%.0f MB/s, %.0f MB/s (%.2f ×)\t", writes, plainWrites, writes/plainWrites)
	row("encryption: reads, likewise\t%.0f MB/s, %.0f MB/s (%.2f ×)\t", reads, plainReads, reads/plainReads)
	if both > budgetOpen {
		b.Errorf("opening took %v, %v are allowed", both, budgetOpen)
	}
}

// throughput writes to a device and reads it, in MB/s. The kernel keeps nothing of what was written.
func throughput(b *testing.B, device string, size int64) (writes, reads float64) {
	timed := func(do func(f *os.File) error) float64 {
		f, err := os.OpenFile(device, os.O_RDWR, 0)
		if err == nil {
			err = os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0)
		}
		start := time.Now()
		if err == nil {
			err = do(f)
		}
		took := time.Since(start)
		if err != nil {
			b.Fatal(err)
		}
		_ = f.Close()
		return float64(size) / 1e6 / took.Seconds()
	}
	block := make([]byte, 1<<20)
	writes = timed(func(f *os.File) error {
		for range size / int64(len(block)) {
			if _, err := f.Write(block); err != nil {
				return err
			}
		}
		return f.Sync()
	})
	reads = timed(func(f *os.File) error {
		_, err := io.CopyBuffer(io.Discard, io.LimitReader(struct{ io.Reader }{f}, size), block)
		return err
	})
	return writes, reads
}
