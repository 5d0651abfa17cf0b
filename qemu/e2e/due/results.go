package due

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// Results is the directory with a file for each test.
type Results string

func (r Results) path(test string) string {
	return filepath.Join(string(r), strings.ReplaceAll(test, "/", "_")+".json")
}

// Last is the last result of a test, or nil. A damaged file is as none.
func (r Results) Last(test string) (*Result, error) {
	text, err := os.ReadFile(r.path(test))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("result of %s: %w", test, err)
	}
	var last Result
	if json.Unmarshal(text, &last) != nil {
		return nil, nil
	}
	return &last, nil
}

// Add keeps a result in the place of the last one.
func (r Results) Add(test string, result Result) error {
	last, err := r.Last(test)
	if err != nil {
		return err
	}
	if last != nil && last.FirstFailure != "" && differ(last.Covered, result.Covered) == "" {
		result.FirstFailure = last.FirstFailure
	}
	text, err := json.MarshalIndent(result, "", "  ")
	if err == nil {
		err = os.MkdirAll(string(r), 0o755)
	}
	if err == nil {
		err = os.WriteFile(r.path(test)+".new", text, 0o644)
	}
	if err == nil {
		err = os.Rename(r.path(test)+".new", r.path(test))
	}
	if err != nil {
		return fmt.Errorf("keep the result of %s: %w", test, err)
	}
	return nil
}
