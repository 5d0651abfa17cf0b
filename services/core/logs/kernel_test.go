package logs

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestKernelRecords(t *testing.T) {
	for record, want := range map[string]*KernelRecord{
		"6,339,5140900,-;NET: Registered PF_INET\n SUBSYSTEM=net\n": {Level: 6, Sequence: 339, SinceBoot: 5140900 * time.Microsecond, Message: "NET: Registered PF_INET"},
		"30,340,5690716,-,caller=T1;[garboard] up":                  {Level: 6, Program: true, Sequence: 340, SinceBoot: 5690716 * time.Microsecond, Message: "[garboard] up"},
		`3,1,0,-;a\x09b\x0ac\xfz \x`:                                {Level: 3, Sequence: 1, Message: "a\tb\nc\\xfz \\x"},
		"2,1,1,-;bad \xff":                                          {Level: 2, Sequence: 1, SinceBoot: time.Microsecond, Message: "bad \xff"},
		"":                                                          nil,
		"6,1,-;short":                                               nil,
		"x,1,2,-;none":                                              nil,
		"6,1,-2,-;none":                                             nil,
		"6,-,2,-;none":                                              nil,
	} {
		if diff := cmp.Diff(want, parseKernel([]byte(record))); diff != "" {
			t.Errorf("%q: %s", record, diff)
		}
	}
}

// The log has the kernel's messages, with the right time after the clock was set, and not
// those of programs.
func TestFollowKernel(t *testing.T) {
	path := filepath.Join(t.TempDir(), "kmsg")
	if err := os.WriteFile(path, []byte("14,1,1000000,-;[garboard] up\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	l := New(nil)
	l.now = func() time.Time { return time.Date(2026, 11, 25, 12, 1, 0, 0, time.UTC) }
	// A file has an end, unlike the kernel's log.
	follow := func(record string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(record), 0o600); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		if err := l.FollowKernel(ctx, path, func() time.Duration { return time.Minute }); err == nil {
			t.Error("it has ended without an error")
		}
	}
	follow("14,1,1000000,-;[garboard] up\n")
	follow("2,7,30000000,-;Out of memory\n")
	want := []string{"2026/11/25 12:00:30  error: Out of memory"}
	if diff := cmp.Diff(want, l.Tail(KernelID, 0)); diff != "" {
		t.Error(diff)
	}
}

// A dump is several files, which count from the end of the log.
func TestCrash(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"dmesg-efi_pstore-176400000001001": "Panic#2 Part1\n<0>[   12.000003] Kernel panic - not syncing: NMI: Not continuing\n<6>[   12.000004] Kernel Offset: 0x1\n",
		"dmesg-efi_pstore-176400000002001": "Panic#2 Part2\n<6>[   12.000001] first\n<6>[   12.000002] sec\xffond\n",
		"dmesg-erst-1":                     "without a head",
		"console-ramoops-0":                "something else",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	lines, why, forget := Crash(dir)
	want := []string{"without a head", "<6>[   12.000001] first", "<6>[   12.000002] sec?ond", "<0>[   12.000003] Kernel panic - not syncing: NMI: Not continuing", "<6>[   12.000004] Kernel Offset: 0x1"}
	if diff := cmp.Diff(want, lines); diff != "" || why != "NMI: Not continuing" {
		t.Errorf("%s\n%s", why, diff)
	}
	if err := forget(); err != nil {
		t.Fatal(err)
	}
	if lines, why, _ := Crash(dir); lines != nil || why != "" {
		t.Errorf("%s, %s", lines, why)
	}
}
