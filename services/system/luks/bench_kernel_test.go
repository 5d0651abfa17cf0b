//go:build kernel

package luks

import (
	"fmt"
	"io"
	"log/slog"
	"os"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/garboard-os/garboard/services/core/process"
	"github.com/garboard-os/garboard/tools/testing/loopdisk"
)

// What is read and written through encryption, beside the same disk without it. The kernel is that of User Mode Linux,
// which doesn't use the processor's instructions for AES: a machine does better.
func BenchmarkEncryption(b *testing.B) {
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	defer w.Flush()
	row := func(format string, args ...any) { fmt.Fprintf(w, format+"\n", args...) }
	l := &Layer{
		Label: "EPHEMERAL", Derivation: []string{"--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000"}, Processes: process.New(), Log: slog.New(slog.DiscardHandler),
		Keys: func() ([]Key, error) { return []Key{key(0, "first")}, nil },
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
	above, err := l.Open(b.Context(), device)
	if err != nil {
		b.Fatal(err)
	}
	writes, reads := throughput(b, above, size)
	if err := l.Close(); err != nil {
		b.Error(err)
	}
	row("encryption: writes, beside those of the plain disk\t%.0f MB/s, %.0f MB/s (%.2f ×)\t", writes, plainWrites, writes/plainWrites)
	row("encryption: reads, likewise\t%.0f MB/s, %.0f MB/s (%.2f ×)\t", reads, plainReads, reads/plainReads)
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
