package configuration

import (
	"cmp"
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/resource"
)

const (
	bootsFile = "boots.json"
	// maxBoots are kept: enough to see what a machine does that restarts again and again.
	maxBoots = 32
	// noReason is the end of a boot for which PID 1 has written none.
	noReason = "without a shutdown: the power failed, the kernel panicked, or the machine was reset"
)

// Boot is a start of this node.
type Boot struct {
	Number  uint64    `json:"number" yaml:"-"`
	Began   time.Time `json:"began" yaml:"began" column:"BEGAN"` // by the clock then, which may have been wrong
	Release string    `json:"release" yaml:"release" column:"RELEASE"`
	Slot    string    `json:"slot,omitempty" yaml:"slot,omitempty" column:"SLOT"`
	Exit    string    `json:"exit,omitempty" yaml:"exit,omitempty" column:"EXIT"` // how and why it ended; "": it runs
	// Before is what boot.ExitFile had at its beginning.
	Before string `json:"before,omitempty" yaml:"-"`
}

// Boots are the last ones, by number.
var Boots = resource.Define[Boot](resource.Definition{
	Type: "Boots.runtime.garboard.dev", Kind: "Boot", Aliases: []string{"boot", "reboots"}, Namespace: "runtime",
})

// BootNumber is the number of this boot; 0 until it is recorded.
func BootNumber(r resource.Reader) (number uint64) {
	for _, b := range Boots.List(r) {
		number = max(number, b.Spec.Number)
	}
	return number
}

// RecordBoot adds this boot to the history on STATE, once, and publishes it. panicked is why
// the kernel of the last boot died, as far as it could store that.
func (a *Applier) RecordBoot(slot, panicked string) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.recorded {
		return nil
	}
	exit, err := a.stored.read(filepath.Base(boot.ExitFile))
	data, unread := a.stored.read(bootsFile)
	if err = cmp.Or(err, unread); err != nil {
		return err
	}
	var all []Boot
	if json.Unmarshal(data, &all) != nil { // there is none, or it is damaged: the history isn't worth more than a boot
		all = nil
	}
	this := Boot{Number: 1, Began: a.o.Now(), Release: boot.Version, Slot: slot, Before: strings.TrimSpace(string(exit))}
	if n := len(all); n > 0 {
		last := &all[n-1]
		switch {
		case this.Before != last.Before:
			last.Exit = this.Before
		case panicked != "":
			last.Exit = "the kernel panicked: " + panicked
		default:
			last.Exit = noReason
		}
		this.Number = last.Number + 1
	}
	all = append(all, this)
	all = slices.Clone(all[max(0, len(all)-maxBoots):])
	if err := a.stored.write(bootsFile, all); err != nil {
		return err
	}
	a.recorded = true
	for _, b := range all {
		if err := Boots.Put(a.o.Store.As(ID), fmt.Sprintf("%06d", b.Number), b); err != nil {
			return err
		}
	}
	return nil
}
