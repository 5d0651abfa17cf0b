package logship

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// A pod with a hostPath puts something else in the place of the audit log: nothing of it is
// sent, nothing waits for it, one line says so, and the log is read again when it is back.
func TestSomethingElseInPlaceOfTheAuditLog(t *testing.T) {
	secret := filepath.Join(t.TempDir(), "config.yaml")
	must(t, os.WriteFile(secret, []byte("token: s3cret\n"), 0o600))
	link := func(to string) func(string) error {
		return func(path string) error { return os.Symlink(to, path) }
	}
	for name, attack := range map[string]func(path string) error{
		"link":      link(secret),
		"zero":      link("/dev/zero"),
		"fifo":      func(path string) error { return unix.Mkfifo(path, 0o600) },
		"directory": func(path string) error { return os.Mkdir(path, 0o755) },
		"hard link": func(path string) error {
			beside := filepath.Join(filepath.Dir(path), "key")
			must(t, os.WriteFile(beside, []byte("s3cret\n"), 0o600))
			return os.Link(beside, path)
		},
		"huge": func(path string) error {
			must(t, os.WriteFile(path, nil, 0o600))
			return os.Truncate(path, 1<<40)
		},
		"directory behind a link": func(path string) error {
			must(t, os.Remove(filepath.Dir(path)))
			must(t, os.WriteFile(filepath.Join(filepath.Dir(secret), filepath.Base(path)), []byte("s3cret\n"), 0o600))
			return os.Symlink(filepath.Dir(secret), filepath.Dir(path))
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			a := &auditLog{path: r.o.AuditLog, feed: r.logs.Feed()}
			reader := r.logs.Feed().Read()
			var got []string
			poll := func() {
				t.Helper()
				a.poll(t.Context())
				records, missed := reader.Next(1 << 20)
				if missed > 0 {
					t.Errorf("%d lines didn't fit", missed)
				}
				for _, record := range records {
					got = append(got, record.Message)
				}
			}
			a.poll(t.Context()) // the directory is there, the log isn't
			must(t, attack(a.path))
			for range 3 {
				poll()
			}
			if len(got) != 1 || strings.Contains(got[0], "s3cret") || !strings.Contains(got[0], "audit log") {
				t.Errorf("sent: %.200q; want one line that says why nothing is", got)
			}
			must(t, os.RemoveAll(filepath.Dir(a.path)))
			must(t, os.Mkdir(filepath.Dir(a.path), 0o700))
			must(t, os.WriteFile(a.path, []byte("event\n"), 0o600))
			got = nil
			poll()
			if len(got) == 0 || got[len(got)-1] != "event" {
				t.Errorf("sent afterwards: %q", got)
			}
		})
	}
}
