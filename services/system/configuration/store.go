package configuration

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/garboard-os/garboard/boot"
)

const (
	// historySize is how many applied configurations are stored on STATE: 10 to 100 KiB
	// each, little compared with the size of STATE.
	historySize = 10

	stagedFile = "config-staged.json"
	tryFile    = "config-try.json"
	historyDir = "config-history"

	// storeMode is the mode of the files: they hold the keys of the cluster.
	storeMode = 0o600
)

// store is what stays of the configuration when the power goes. Each file is
// replaced in one step, and config.yaml is the one that counts:
//
//	config.yaml          the configuration
//	config-staged.json   becomes config.yaml at the next boot
//	config-try.json      what comes back unless the change is confirmed
//	config-history/N     what was applied, newest last
type store struct{ dir string }

func (k store) path(name string) string { return filepath.Join(k.dir, name) }

func (k store) config() string { return k.path(filepath.Base(boot.ConfigFile)) }

// read returns nil for a file that isn't there.
func (k store) read(name string) ([]byte, error) {
	data, err := os.ReadFile(k.path(name))
	return data, boot.IgnoreMissing(err)
}

// write replaces a file by value as JSON.
func (k store) write(name string, value any) error {
	data, err := json.Marshal(value)
	if err != nil {
		return err
	}
	return boot.WriteFile(k.path(name), data, storeMode)
}

// remove is durable: what is removed stays so after a power cut.
func (k store) remove(name string) error {
	err := os.Remove(k.path(name))
	if err != nil {
		return boot.IgnoreMissing(err)
	}
	return boot.SyncDir(k.dir)
}

// sweep removes temporary files of writes that a power cut interrupted.
func (k store) sweep() error {
	left, _ := filepath.Glob(k.path(".config*")) // the patterns are right
	entries, _ := filepath.Glob(k.path(filepath.Join(historyDir, ".*")))
	for _, path := range append(left, entries...) {
		if err := os.Remove(path); err != nil {
			return err
		}
	}
	return nil
}

// Digest names a document in the API: hexadecimal SHA-256.
func Digest(text []byte) string {
	return fmt.Sprintf("%x", sha256.Sum256(text))
}

// historyEntry is an entry of the history as a file.
type historyEntry struct {
	Entry
	Text []byte `json:"text,omitempty"` // none while the configuration isn't kept (persist: false)
}

// document is the text of an entry.
func (e historyEntry) document() ([]byte, error) {
	if e.Text == nil {
		return nil, fmt.Errorf("the document of version %d %w", e.Version, ErrNotKept)
	}
	return e.Text, nil
}

func (k store) entryPath(version uint64) string {
	return filepath.Join(historyDir, fmt.Sprintf("%012d.json", version))
}

// history reads all entries, oldest first. An entry that can't be parsed is left out:
// nothing depends on it.
func (k store) history() ([]historyEntry, error) {
	paths, _ := filepath.Glob(k.path(filepath.Join(historyDir, "*.json"))) // the pattern is right, and they are sorted
	var all []historyEntry
	for _, path := range paths {
		data, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		var one historyEntry
		if json.Unmarshal(data, &one) == nil && one.Version > 0 {
			all = append(all, one)
		}
	}
	return all, nil
}

// remember adds an entry as the newest, and removes those beyond historySize.
func (k store) remember(e Entry, text []byte) (version uint64, err error) {
	all, err := k.history()
	if err != nil {
		return 0, err
	}
	e.Version = 1
	if len(all) > 0 {
		e.Version = all[len(all)-1].Version + 1
	}
	if err := os.MkdirAll(k.path(historyDir), 0o700); err != nil {
		return 0, err
	}
	if err := k.write(k.entryPath(e.Version), historyEntry{Entry: e, Text: text}); err != nil {
		return 0, err
	}
	for len(all) >= historySize {
		if err := boot.IgnoreMissing(os.Remove(k.path(k.entryPath(all[0].Version)))); err != nil {
			return 0, err
		}
		all = all[1:]
	}
	return e.Version, nil
}

// forget removes the documents from all entries, and leaves who applied them, and when.
func (k store) forget() error {
	all, err := k.history()
	for _, e := range all {
		if err == nil && e.Text != nil {
			err = k.write(k.entryPath(e.Version), historyEntry{Entry: e.Entry})
		}
	}
	return err
}

// trial is a change that isn't confirmed yet.
//
//	tried live:      journal, config.yaml ─▶ confirmed: journal removed
//	                                      └▶ time is up, or any boot: previous comes back
//	with a reboot:   journal (Reboot), config.yaml ─▶ boot: journal (no Reboot), the clock
//	                 runs ─▶ as above; or it can't read config.yaml: previous comes back
type trial struct {
	// Previous is what comes back.
	Previous []byte `json:"previous"`
	// Tried is the digest of what is tried: with another config.yaml the journal
	// was written and the power went before the change was. With none, what is tried
	// has persist: false.
	Tried   string        `json:"tried"`
	Timeout time.Duration `json:"timeout"`
	// Reboot: the change is tried by the next boot, which isn't its undoing.
	Reboot bool   `json:"reboot"`
	By     string `json:"by"`
}

// readTrial returns nil if nothing is being tried.
func (k store) readTrial() (*trial, error) {
	data, err := k.read(tryFile)
	if err != nil || data == nil {
		return nil, err
	}
	var t trial
	if err := json.Unmarshal(data, &t); err != nil {
		return nil, fmt.Errorf("%s: %w", k.path(tryFile), err)
	}
	return &t, nil
}
