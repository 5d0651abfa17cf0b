package disks

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/garboard-os/garboard/boot"
)

// recordFile is a file on STATE: on which disk each entry of machine.disks was made. While that disk is missing, the entry isn't made
// on another one, whose partitions would hide the data once both are there.
const recordFile = "data-disks.json"

// madeOn is the disk of an entry.
type madeOn struct {
	Model  string `json:"model,omitempty"`
	Serial string `json:"serial,omitempty"`
	WWID   string `json:"wwid,omitempty"`
	Size   int64  `json:"size"` // bytes
}

func (m madeOn) String() string {
	words := []string{m.Model, bytesText(m.Size)}
	if m.Serial != "" {
		words = append(words, "serial "+m.Serial)
	}
	return strings.TrimPrefix(strings.Join(words, ", "), ", ")
}

// is reports whether this is the same disk for sure.
func (m madeOn) is(dev device) bool {
	return m.Serial+m.WWID != "" && m.Serial == dev.Serial && m.WWID == dev.WWID
}

// records are the entries that were made, by their names.
func (d *Disks) records() (map[string]madeOn, error) {
	records := map[string]madeOn{}
	path := filepath.Join(d.o.stateDir, recordFile)
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return records, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &records)
	}
	if err == nil && records == nil {
		err = errors.New("it has no entries")
	}
	if err != nil {
		err = fmt.Errorf("%s, which has the disks of machine.disks: %w", path, err)
	}
	return records, err
}

// record notes on which disk an entry was made.
func (d *Disks) record(name string, dev device) error {
	records, err := d.records()
	on := madeOn{dev.Model, dev.Serial, dev.WWID, dev.Size}
	if err != nil || records[name] == on {
		return err
	}
	records[name] = on
	text, err := json.Marshal(records)
	if err != nil {
		return err
	}
	return boot.WriteFile(filepath.Join(d.o.stateDir, recordFile), text, 0o600)
}
