package due

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"go/scanner"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// Content is the hash of each file of a checkout, by its path with slashes.
type Content map[string]string

// hash is that of the files that are wanted, with their names.
func (c Content) hash(want func(file string) bool) string {
	sum := sha256.New()
	for _, file := range slices.Sorted(maps.Keys(c)) {
		if want(file) {
			fmt.Fprintf(sum, "%s %s\n", file, c[file])
		}
	}
	return fmt.Sprintf("%x", sum.Sum(nil)[:8])
}

// Read hashes the files below a directory, which is a copy of a checkout.
func Read(dir string) (Content, error) {
	c := Content{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		file, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		data, err := os.ReadFile(path)
		c[filepath.ToSlash(file)] = hashFile(file, data)
		return err
	})
	return c, err
}

// At is the content of a commit. It is computed from the present one, and from the files
// that were changed since.
func At(ctx context.Context, checkout, commit string, now Content) (Content, error) {
	before, err := Git(ctx, checkout, "ls-tree", "-r", "-z", "--name-only", commit)
	if err != nil {
		return nil, err
	}
	changed, err := Git(ctx, checkout, "diff", "-z", "--name-only", "--no-renames", commit)
	if err != nil {
		return nil, err
	}
	isChanged := map[string]bool{}
	for file := range strings.SplitSeq(changed, "\x00") {
		isChanged[file] = true
	}
	former := Content{}
	for file := range strings.SplitSeq(strings.TrimSuffix(before, "\x00"), "\x00") {
		if hash, there := now[file]; there && !isChanged[file] {
			former[file] = hash
			continue
		}
		data, err := Git(ctx, checkout, "show", commit+":"+file)
		if err != nil {
			return nil, err
		}
		former[file] = hashFile(file, []byte(data))
	}
	return former, nil
}

// Git is what git prints in a checkout.
func Git(ctx context.Context, checkout string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "git", args...)
	cmd.Dir = checkout
	out, err := cmd.Output()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		err = fmt.Errorf("%w: %s", err, bytes.TrimSpace(exit.Stderr))
	}
	if err != nil {
		return "", fmt.Errorf("git %s: %w", strings.Join(args, " "), err)
	}
	return string(out), nil
}

// hashFile is the hash of a file. That of Go code is the same where only comments and
// spaces differ; directives are no comments.
func hashFile(name string, data []byte) string {
	if filepath.Ext(name) != ".go" {
		return fmt.Sprintf("%x", sha256.Sum256(data))
	}
	sum := sha256.New()
	file := token.NewFileSet().AddFile("", -1, len(data))
	var s scanner.Scanner
	s.Init(file, data, nil, scanner.ScanComments)
	for {
		_, tok, text := s.Scan()
		switch {
		case tok == token.EOF:
			return fmt.Sprintf("%x", sum.Sum(nil))
		case tok == token.COMMENT && !strings.HasPrefix(text, "//go:"), tok == token.SEMICOLON:
		default:
			fmt.Fprintf(sum, "%s %s\n", tok, text)
		}
	}
}
