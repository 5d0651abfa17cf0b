package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/garboard-os/garboard/image/components/podcheckpointer/checkpoint"
	core "k8s.io/api/core/v1"
)

const (
	fileMode = 0o600
	dirMode  = 0o700
)

// store has the checkpoints in files:
//
//	DIR/inactive/NAMESPACE-NAME.json       every checkpoint
//	DIR/secrets/NAMESPACE/NAME/SECRET/…    the files of its Secrets
//	DIR/configmaps/NAMESPACE/NAME/MAP/…    the files of its ConfigMaps
//	DIR/manifests/NAMESPACE-NAME.json      active ones: the node copies them to STATIC before
//	                                       the kubelet starts, because STATIC is empty after a boot
//	STATIC/NAMESPACE-NAME.json             active ones, for the kubelet
type store struct{ dir, static string }

func (s store) inactive(id string) string {
	return filepath.Join(s.dir, "inactive", fileName(id))
}

// active returns both files of an active checkpoint.
func (s store) active(id string) []string {
	return []string{filepath.Join(s.dir, "manifests", fileName(id)), filepath.Join(s.static, fileName(id))}
}

func fileName(id string) string { return strings.ReplaceAll(id, "/", "-") + ".json" }

// load returns all checkpoints, by ID.
func (s store) load() (map[string]checkpoint.Checkpoint, error) {
	paths, err := filepath.Glob(filepath.Join(s.dir, "inactive", "*.json"))
	if err != nil {
		return nil, err
	}
	all := map[string]checkpoint.Checkpoint{}
	for _, path := range paths {
		data, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		pod := &core.Pod{}
		if err := json.Unmarshal(data, pod); err != nil {
			return nil, fmt.Errorf("%s: %w; remove the file, it is written again", path, err)
		}
		id := checkpoint.ID(pod)
		c := checkpoint.Checkpoint{Own: checkpoint.IsOwn(pod)}
		for _, file := range s.active(id) {
			if _, err := os.Stat(file); err == nil {
				c.Active = true
			}
		}
		all[id] = c
	}
	return all, nil
}

// writeSource writes the files of a Secret or a ConfigMap, and removes those that it no
// longer has.
func (s store) writeSource(dir string, files map[string][]byte) error {
	if err := os.MkdirAll(dir, dirMode); err != nil {
		return err
	}
	for name, data := range files {
		if _, err := replace(filepath.Join(dir, name), data); err != nil {
			return err
		}
	}
	return filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		name, err := filepath.Rel(dir, path)
		if _, wanted := files[name]; err == nil && !wanted {
			err = os.Remove(path)
		}
		return err
	})
}

// activate copies a checkpoint to the active ones, and reports whether something changed.
func (s store) activate(id string) (changed bool, err error) {
	data, err := os.ReadFile(s.inactive(id))
	if err != nil {
		return false, err
	}
	for _, path := range s.active(id) {
		wrote, err := replace(path, data)
		if err != nil {
			return changed, err
		}
		changed = changed || wrote
	}
	return changed, nil
}

func (s store) deactivate(id string) error {
	var errs []error
	for _, path := range s.active(id) {
		if err := os.Remove(path); !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// remove removes a checkpoint. The inactive manifest is last: until then, the removal can be
// repeated.
func (s store) remove(id string) error {
	if err := s.deactivate(id); err != nil {
		return err
	}
	return errors.Join(
		os.RemoveAll(filepath.Join(s.dir, "secrets", id)),
		os.RemoveAll(filepath.Join(s.dir, "configmaps", id)),
		os.Remove(s.inactive(id)))
}

// replace writes a file in one step, unless it has this content.
func replace(path string, data []byte) (wrote bool, err error) {
	if had, err := os.ReadFile(path); err == nil && bytes.Equal(had, data) {
		return false, nil
	}
	if err := os.MkdirAll(filepath.Dir(path), dirMode); err != nil {
		return false, err
	}
	// The kubelet ignores files whose name begins with a dot.
	f, err := os.CreateTemp(filepath.Dir(path), ".*")
	if err != nil {
		return false, err
	}
	defer os.Remove(f.Name())
	_, err = f.Write(data)
	if err = errors.Join(err, f.Chmod(fileMode), f.Sync(), f.Close()); err != nil {
		return false, err
	}
	return true, os.Rename(f.Name(), path)
}
