package dag

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
)

// answerLimit is how much of a bad answer is shown: a program that lists its
// checks has the first failing one within it.
const answerLimit = 512 // bytes

// HTTPCheck is a health check: the URL answers with status 200.
func HTTPCheck(url string) func(context.Context) error {
	return HTTPCheckBy(http.DefaultClient, url)
}

// HTTPCheckBy is HTTPCheck by another client than the usual one.
func HTTPCheckBy(client *http.Client, url string) func(context.Context) error {
	return func(ctx context.Context) error {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		resp, err := client.Do(req)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if resp.StatusCode == http.StatusOK {
			return nil
		}
		body, _ := io.ReadAll(io.LimitReader(resp.Body, answerLimit)) // a partial body is still worth showing
		return fmt.Errorf("get %q: %s: %s", url, resp.Status, strings.TrimSpace(string(body)))
	}
}
