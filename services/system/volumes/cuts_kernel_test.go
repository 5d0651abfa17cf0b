//go:build kernel

package volumes

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/system/disk"
	"github.com/garboard-os/garboard/tools/testing/loopdisk"
)

// cuts is a disk whose work is killed at random times.
type cuts struct {
	*testing.T
	random *rand.Rand
	system string
	data   *loopdisk.Disk
	keys   []config.EncryptionKey // that the disk has, or is to have
	made   int                    // passphrases
	takes  time.Duration          // what was last done without a cut
}

// GARBOARD_CUTS is how often; GARBOARD_SEED repeats a run.
func number(t *testing.T, name string, otherwise int64) int64 {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return otherwise
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// The power goes at random times, while a disk is formatted, its keys are added, replaced and removed, and a reset
// wipes it: then the volume opens with the keys of the configuration and has its content, or it had none yet.
func TestPowerCutsOfAnEncryptedDisk(t *testing.T) {
	seed := number(t, "GARBOARD_SEED", time.Now().UnixNano())
	t.Logf("GARBOARD_SEED=%d", seed)
	c := &cuts{T: t, random: rand.New(rand.NewPCG(uint64(seed), 0)), system: t.TempDir(), data: loopdisk.New(t, 400*mib), takes: 2 * time.Second}
	c.keys = []config.EncryptionKey{c.key(0)}
	content, done := "", map[string]int{}
	for i := range number(t, "GARBOARD_CUTS", 40) {
		what := "format"
		switch {
		case content != "" && c.random.IntN(5) == 0:
			what, content = "wipe", ""
			c.wipe()
			c.keys = []config.EncryptionKey{c.key(c.random.IntN(4))}
		case content != "":
			what = "keys"
			c.rotate()
		}
		start := time.Now()
		killed := c.boots(c.within(c.takes+c.takes/4), func(m *node, err error) {})
		begun := time.Now()
		c.boots(time.Hour, func(m *node, err error) {
			if err != nil {
				t.Fatalf("cut %d, %s: %v", i, what, err)
			}
			if content != "" && m.read("var/mnt/data/mine") != content {
				t.Fatalf("cut %d, %s: the content is lost", i, what)
			}
			content = fmt.Sprint("content of ", i)
			m.write("var/mnt/data/mine", content)
		})
		c.takes = time.Since(begun)
		if killed {
			done[what]++
		}
		t.Logf("cut %d: %s, killed: %v, %s", i, what, killed, begun.Sub(start).Round(time.Millisecond))
	}
	t.Logf("killed: %v", done)
}

// boots mounts the disk and settles its keys, until the power goes.
func (c *cuts) boots(power time.Duration, then func(*node, error)) (killed bool) {
	c.Helper()
	m := boots(c.T, c.system, c.data).numbered()
	defer m.off()
	ctx, cut := context.WithTimeout(c.Context(), power)
	defer cut()
	wanted := dataDisk(c.data.Path, sealed(partitionOf("data", 0, config.Ext4), c.keys...))
	_, _, err := m.volumes.mount(ctx, wanted)
	if err == nil {
		_, _, err = m.volumes.mount(ctx, wanted)
	}
	if err == nil {
		for _, problem := range m.volumes.settled {
			if problem != nil {
				err = problem
			}
		}
	}
	then(m, err)
	return ctx.Err() != nil
}

func (c *cuts) within(most time.Duration) time.Duration {
	return time.Duration(c.random.Int64N(int64(most)))
}

func (c *cuts) key(slot int) config.EncryptionKey {
	c.made++
	return staticKey(slot, config.Secret(fmt.Sprint("passphrase ", c.made)))
}

// rotate keeps one key in its slot, and has new ones in some others.
func (c *cuts) rotate() {
	kept := c.keys[c.random.IntN(len(c.keys))]
	c.keys = []config.EncryptionKey{kept}
	for _, slot := range c.random.Perm(4)[:c.random.IntN(3)] {
		if slot != *kept.Slot {
			c.keys = append(c.keys, c.key(slot))
		}
	}
}

// wipe does what a reset does, and again what was cut: that is recorded on the system's disk.
func (c *cuts) wipe() {
	c.Helper()
	mode := append(boot.WipeModes, "")[c.random.IntN(4)]
	for _, power := range []time.Duration{c.within(time.Second), time.Hour} {
		ctx, cut := context.WithTimeout(c.Context(), power)
		d, err := disk.At(c.data.Path)
		if err != nil {
			d.Table = nil // it is gone already
		}
		err = d.ChangeUnused(func(file *os.File) error {
			sealed, err := d.ShredAll(ctx, file)
			if err == nil {
				err = d.WipeAll(ctx, file, mode, sealed, func(int64) {})
			}
			return err
		})
		if err != nil && ctx.Err() == nil {
			c.Fatalf("wipe with mode %q: %v", mode, err)
		}
		cut()
	}
}
